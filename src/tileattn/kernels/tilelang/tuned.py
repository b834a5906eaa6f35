"""What the tuner has found for calls of known sizes, and how its candidates are compiled: of both passes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...tuner import results

if TYPE_CHECKING:
    from .build.batch import AnyJob

Sizes = tuple[int, int, int, int]
# Each process imports TileLang and runs nvcc: more of them want more memory than they save time.
MAX_PROCESSES = 16
LARGEST = 2**20  # of any number in a configuration
MAY_BE_ZERO = ("num_stages", "ds_buffers", "tile_stages", "gradient_bytes", "patience")


def sizes_of(q_shape: torch.Size, k_shape: torch.Size) -> Sizes:
    """What results are kept by, of bshd tensors: batch * heads, seqlen_q, seqlen_k, query heads per key/value head."""
    batch, seqlen_q, heads, _ = q_shape
    return batch * heads, seqlen_q, k_shape[1], heads // k_shape[2]


def found(
    arch: str,
    call: object,
    sizes: Sizes,
    schedules: Mapping[str, Callable[..., Any]],
    fits: Callable[[Any], bool],
) -> Any:
    """The tuner's result for a call; None where there is none, or it is not valid (any more).

    Args:
        call: whose text results are kept by.
        schedules: classes of configurations, by name.
        fits: whether a configuration is valid for the call.
    """
    record = results.find(arch, str(call), sizes)
    config = None if record is None else restored(record, schedules)
    return config if config is not None and fits(config) else None


def compiled(jobs: Mapping[Any, Sequence[AnyJob]]) -> Iterator[tuple[Any, str | None]]:
    """Compiles the kernels of configurations into the cache; see :class:`Space`.

    jobs: of each configuration, in the order in which they begin; one that several have is compiled once.
    """
    from .build.batch import CORES, compile_all

    waiting = {config: {job.key for job in its} for config, its in jobs.items()}
    distinct: dict[str, AnyJob] = {}
    for job in itertools.chain.from_iterable(jobs.values()):
        distinct.setdefault(job.key, job)
    errors: dict[Any, str] = {}
    for done in compile_all(list(distinct.values()), min(CORES, MAX_PROCESSES)):
        for config, keys in list(waiting.items()):
            if done.job.key in keys:
                keys.remove(done.job.key)
                if done.error is not None:
                    errors[config] = done.error
                if not keys:
                    yield config, errors.get(config)


def restored(record: dict[str, Any], schedules: Mapping[str, Callable[..., Any]]) -> Any:
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
