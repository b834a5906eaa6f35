"""Tracing: the Python function of a mask or a score modification becomes an expression."""
