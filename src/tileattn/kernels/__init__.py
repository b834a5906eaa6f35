"""The backends: one folder each, with the same module names (`backend`, `forward`, `backward`). None imports another.

`cache`, which the backends share, keeps compiled kernels on disk.
"""
