"""Builds a TileLang function into a library in the cache and loads it; batch.py compiles many at once."""
