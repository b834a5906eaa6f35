"""Kernels: a matrix of backend x phase, with the same file names in each folder. No backend imports another."""
