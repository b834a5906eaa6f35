"""The kernel that makes lists of tiles (tile_lists.py): bounds of each tile in registers, by the same rules.

registers  what stands for a tensor of bounds: a node of the kernel's computation
analysis   a mask's rules, evaluated on registers: the nodes that a kernel computes for a tile, or why it cannot
emit       nodes as TileLang expressions
kernel     the kernel
library    its key, library and job
launch     lists of a call, by the kernel or by PyTorch's operations
"""
