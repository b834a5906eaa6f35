"""From a TileLang function to a library on disk and a loaded one: compile, nvcc, library; batch for many at once."""
