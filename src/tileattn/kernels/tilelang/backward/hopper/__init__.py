"""The backward kernels for Hopper and their parts.

keys.py         dk, dv and dq's sums: each block owns 128 keys
wide.py         dk and dv of wide heads: each block owns 64 keys
queries.py      dq alone: each block owns 128 queries

plan.py         static facts of a kernel; tiles of the one for keys
wide_plan.py    ... of the one for wide heads
roles.py        a block's place in the grid, and each warp's role
stages.py       which stage of a buffer a warp uses next, and the release of one
loads.py        K and V once, then Q and dO tile by tile
wide_loads.py   ... panel by panel
products.py     products on the tensor cores: started and awaited
scores.py       from scores to probabilities and to gradients of scores
copied_tile.py  a bias's tiles and their gradient
dq_sums.py      dS exchanged by the warpgroups, and dQ added up in memory

config.py       tile sizes, their limits and preferences
dq_order.py     the order of dq's sums in memory
layouts.py      the layouts of products in registers
"""
