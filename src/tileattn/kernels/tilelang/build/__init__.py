"""From a TileLang function to a library on disk: compile, nvcc, many at once."""
