"""Compiled kernels on disk: where they lie, who may write them, and which sources their keys digest."""
