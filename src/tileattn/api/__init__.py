"""What users call: attention, packed sequences, PyTorch's signature, padding."""
