"""The TileLang backend. Read in this order: softmax, mask, forward; then config, compile, launch.

Only ``expressions``, ``softmax``, ``mask``, ``forward`` and ``compile`` import TileLang, and only when a kernel has to
be compiled: a kernel that is in the cache on disk is loaded and launched without it.
"""
