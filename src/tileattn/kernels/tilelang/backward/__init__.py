"""The backward pass: three kernels, of which the second has a schedule for every architecture and others for Hopper.

prepare.py            1. delta = rowsum(do * o) - dlse and lse in powers of two; clears dq's sums
generic.py            2. dk and dv, and dq added up in float32: every architecture
hopper/keys.py           ... sm_90a, head dims up to 128; without dq, both together up to 320
hopper/wide.py           ... sm_90a, wider heads: dk and dv alone
queries.py            2b. dq alone, in a fixed order, where the main kernel leaves it: every architecture
hopper/queries.py        ... sm_90a
finish.py             3. dq in 16 bits from its sums

plan.py               static facts of a kernel, from which its macros choose what they emit
places.py             where a block's tile lies: in a batch element, or in a packed sequence
tile.py               what 2 and 2b do with a tile of scores: probabilities and the gradients of scores
slopes.py             score modifications and their derivatives, rewritten for the inner loop
visible.py            which queries a tile of keys is seen by
operand_gradients.py  gradients of the tensors that score modifications read
operand_stores.py     ... what a kernel does for them
hopper/               the Hopper schedules' kernels and their parts

config.py             tiles of the generic schedule, and which fit
hopper/config.py      ... of the Hopper schedules
defaults.py           which of all a call gets
signature.py          the kernels' parameters
kernels.py            the TileLang functions
library.py            cache keys; loads the libraries
workspaces.py         what they work in, of dense calls and of packed sequences
launch.py             launches
"""
