"""The TileLang backend. Read in this order: tile/softmax, tile/mask, forward/generic; then build/compile.

What generates and compiles kernels imports TileLang, and only when a kernel has to be compiled: one that is in the
cache on disk is loaded and launched without it.
"""
