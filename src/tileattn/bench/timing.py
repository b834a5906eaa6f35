"""Alias of `tileattn.measure.timing`, for users who import this path."""

from tileattn.measure.timing import DEFAULT, Effort, sample_ms, time_calls

__all__ = ["Effort", "DEFAULT", "sample_ms", "time_calls"]
