"""The torch backend: PyTorch operations for any device and floating-point dtype. It is the default without a GPU."""
