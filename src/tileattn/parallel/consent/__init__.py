"""Before ranks exchange tensors, they make sure that all make the same call."""
