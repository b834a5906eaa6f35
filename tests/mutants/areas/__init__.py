"""The mutants of each area of the package."""
