"""Times of a call, by the path that `tileattn.profile` has shown; the code is in measure/timing.py."""

from tileattn.measure.timing import DEFAULT, Effort, sample_ms, time_calls

__all__ = ["Effort", "DEFAULT", "sample_ms", "time_calls"]
