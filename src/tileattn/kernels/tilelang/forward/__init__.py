"""The forward pass: its kernels, which tiles they get, cache keys and launches."""
