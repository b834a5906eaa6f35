"""The oracle of the benchmark: float64 attention for all of a case or a sample of it, and the errors relative to it.

output       of o
gradients    of dq, dk, dv and the gradient of a bias
packed       of packed sequences
"""
