"""What the kernels compile to, counted without a GPU."""
