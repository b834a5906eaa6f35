"""Which configuration a call of known sizes gets: what the tuner has found for it, else the default."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ...call.facts import AttentionCall
from ...tuner import results
from .forward.amd.config import AmdConfig
from .forward.config import ForwardConfig, HopperConfig
from .forward.defaults import Config, fits

Sizes = tuple[int, int, int, int]
LARGEST = 2**20  # of any number in a configuration
MAY_BE_ZERO = ("num_stages", "ds_buffers", "tile_stages", "gradient_bytes", "patience")
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
    """The configuration of a result (see :class:`tileattn.tuner.results.Result`); None if it is not one of these.

    A record comes from a file that anyone may have edited: what is no configuration at all stops here. Whether it suits
    a call is for the caller to ask.
    """
    fields = dict(record)
    name = fields.pop("schedule", None)
    schedule = schedules.get(name) if isinstance(name, str) else None
    if schedule is None:
        return None
    known = {field.name: field for field in dataclasses.fields(schedule)}
    if not all(name in known and _is_possible(known[name], value) for name, value in fields.items()):
        return None
    try:
        return schedule(**fields)
    except TypeError:  # one is missing
        return None


def _is_possible(field: dataclasses.Field[Any], value: Any) -> bool:
    """Whether a configuration's field can have a value; its annotation is text: "int", "bool" or "float"."""
    if field.type == "bool":
        return isinstance(value, bool)
    numbers = (int, float) if field.type == "float" else (int,)
    return type(value) in numbers and (field.name not in MAY_BE_ZERO) <= value <= LARGEST
