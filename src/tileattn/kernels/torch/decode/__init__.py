"""The decode phase of the PyTorch backend: few queries per sequence, and a contiguous or paged cache."""
