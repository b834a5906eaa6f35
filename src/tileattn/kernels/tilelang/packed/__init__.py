"""Packed sequences on the GPU: the plan of which tiles there are, and who takes which."""
