"""Triton kernels, for every GPU that Triton targets: forward and backward (docs/design/triton.md)."""
