"""What `gpu_check.py` runs on a machine with a GPU. Nothing here is imported by the package."""
