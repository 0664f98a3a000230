"""What measures and studies Nalanda: benches, recall, analysis. Nothing of the product imports it."""
