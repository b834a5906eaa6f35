"""The steps of the mma ladder, the gain of each, and their picture."""
