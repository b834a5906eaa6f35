"""Lines: the tiles of keys that decode calls visit, where a mask may hide tiles between others.

visits   which calls have lines, and lines by PyTorch's operations
kernel   the kernel that makes the same lines in one launch
launch   the lines of a call, by either
library  the kernel's key and library
entries  how the planning kernel and the attention kernels read them
"""
