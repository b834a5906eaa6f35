"""The backward pass: three kernels, of which the second has one schedule for each kind of architecture.

config.py          tile sizes and shared memory; which configuration a call gets; hopper_config.py for Hopper
defaults.py        which schedule a call gets, and whether dq is added up with dk and dv or has a kernel of its own
signature.py       the kernels' parameters
prepare.py         1. delta = rowsum(do * o) - dlse and lse in powers of two; clears dq's accumulator
generic.py         2. dk and dv, and dq added up in float32: every architecture
hopper.py             the same on sm_90, scheduled by hand; wider heads than 128: dk and dv only
hopper_wide.py        dk and dv of still wider heads
finish.py          3. dq from its accumulator
queries.py         or 3. dq alone, without atomics: for deterministic=True, and for wide heads
hopper_queries.py     the same on sm_90, scheduled by hand
tile.py            what 2 and 3 do with a tile of scores: probabilities and the gradients of scores
slopes.py          score modifications and their derivatives, rewritten for the inner loop
visible.py         which queries a tile of keys is seen by
overlap.py         keeps exponentials under the product that they are to run under
order.py           how dq's sums lie in memory
layouts.py         how threads hold products
variables.py       integers held in variables
operands.py        gradients of the tensors that score modifications read
tensors.py         how the kernels hand them over
launch.py          cache keys; loads the libraries
backend.py         workspaces and launches
"""
