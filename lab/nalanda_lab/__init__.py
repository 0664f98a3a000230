"""What measures and studies Nalanda: benches, recall, Long Range Arena, analysis. Nothing of the product imports it."""
