"""The torch backend: PyTorch operations, for any device and floating-point dtype; the default without a GPU."""
