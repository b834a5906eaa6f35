"""The backward pass: three kernels, of which the second has one schedule for each kind of architecture.

config.py      tile sizes and shared memory; which configuration a call gets
signature.py   the kernels' parameters
prepare.py     1. delta = rowsum(do * o) - dlse and lse in powers of two; clears dq's accumulator
generic.py     2. dk and dv, and dq added up in float32: every architecture
queries.py     2b. dq alone, without atomics, for deterministic=True
finish.py      3. dq from its accumulator
tile.py        what 2 and 2b do with a tile of scores: probabilities and the gradients of scores
slopes.py      score modifications and their derivatives, rewritten for the inner loop
visible.py     which queries a tile of keys is seen by
variables.py   integers held in variables
operands.py    gradients of the tensors that score modifications read
launch.py      cache keys; loads the libraries
backend.py     workspaces and launches
"""
