"""Which configuration a call of known sizes gets: what the tuner has found for it, else the default."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ...call import AttentionCall
from ...tuner import results
from .amd_config import AmdConfig
from .config import ForwardConfig, HopperConfig
from .defaults import Config, fits

Sizes = tuple[int, int, int, int]
SCHEDULES = {each.__name__: each for each in (ForwardConfig, HopperConfig, AmdConfig)}


def sizes_of(q_shape: torch.Size, k_shape: torch.Size) -> Sizes:
    """What results are kept by, of bshd tensors: batch * heads, seqlen_q, seqlen_k, query heads per key/value head."""
    batch, seqlen_q, heads, _ = q_shape
    return batch * heads, seqlen_q, k_shape[1], heads // k_shape[2]


def found(call: AttentionCall, sizes: Sizes) -> Config | None:
    """The tuner's result for a call; None where there is none, or it is not valid (any more)."""
    record = results.find(call.arch, str(call), sizes)
    config = None if record is None else restored(record, SCHEDULES)
    return config if config is not None and fits(call, config) else None


def restored(record: dict[str, Any], schedules: dict[str, Any]) -> Any:
    """The configuration of a result (see :class:`tileattn.tuner.results.Result`); None if it is not one of these."""
    fields = dict(record)
    schedule = schedules.get(fields.pop("schedule", None))
    if schedule is None:
        return None
    names = {field.name for field in dataclasses.fields(schedule)}
    if not set(fields) <= names or any(not isinstance(value, (int, float)) for value in fields.values()):
        return None
    try:
        return schedule(**fields)
    except TypeError:
        return None
