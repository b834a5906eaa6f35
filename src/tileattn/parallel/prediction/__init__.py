"""The cost model, and what it predicts for any number of ranks."""
