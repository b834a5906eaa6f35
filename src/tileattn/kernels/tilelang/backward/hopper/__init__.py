"""The backward kernels for Hopper: by keys, by keys with wide heads, by queries."""
