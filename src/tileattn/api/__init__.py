"""The public functions: attention, packed sequences, PyTorch's signature, padding."""
