"""Measurements of a call, for the library, the benchmark and users: time, memory, and the ceilings of the machine."""
