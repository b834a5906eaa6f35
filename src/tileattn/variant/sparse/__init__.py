"""Masks of sparse patterns: patterns.py in one dimension, neighborhood.py in up to three."""
