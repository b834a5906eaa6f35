"""Packed sequences on the GPU: the work list of tiles, the kernel that writes it, and the blocks' tasks."""
