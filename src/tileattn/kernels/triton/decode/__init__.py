"""The decode phase of the Triton backend: few queries per sequence, and a contiguous or paged cache."""
