"""The backward kernels for Hopper, and what they are made of.

keys.py         dk, dv and dq's sums: each block owns 128 keys
wide.py         dk and dv of wide heads: each block owns 64 keys
queries.py      dq alone: each block owns 128 queries

plan.py         static facts of a kernel; tiles of the one for keys
wide_plan.py    ... of the one for wide heads
roles.py        a block's place in the grid, and each warp's part
stages.py       the arithmetic of stages, and the release of one
loads.py        K and V once, then Q and dO tile by tile
wide_loads.py   ... panel by panel
products.py     products given to the tensor cores and awaited
scores.py       from scores to probabilities and to their gradients
matrices.py     stmatrix and ldmatrix: 8 x 8 elements between registers and shared memory
copied_tile.py  a bias's tiles and their gradient
dq_sums.py      dS shared by the warpgroups, and dQ added up in memory

config.py       tiles, and which fit
dq_order.py     how dq's sums lie in memory
layouts.py      how threads hold a product
"""
