"""The calls of attention that the tests of compat/transformers make on a GPU, for benchmarks/precompile.py.

The models run on the CPU in the GPU's size and dtype, with zeros in place of attention. Each call is recorded and made
on tensors without memory. Those of benchmarks/transformers_generate.py, whose keys are many, are written out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import tileattn
import tileattn.compat.transformers as adapter
from tests.compat.transformers.test_models import (
    CHUNKED,
    DEVICES,
    GENERATIONS,
    PACKED,
    Decoding,
    PackedProblem,
    Problem,
    prefill,
)
from tests.tools.transformers.batching import generate_batch
from tests.tools.transformers.models import MODELS
from tileattn import KeyPadding
from tileattn.call.inputs import Operands
from tileattn.compat.transformers import attention, blocks, packed, paged, step
from tileattn.variant.key import encode, normalize
from tileattn.variant.program import decode


@contextmanager
def recording() -> Iterator[list[Callable[[], Any]]]:
    """Inside, models' calls are recorded instead of computed: each as a function that makes it on "meta"."""
    recorded_calls: list[Callable[[], Any]] = []

    def recorder(function: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **options: Any) -> Tensor:
            recorded_calls.append(_on_meta(function, (q, k, v, *arguments), options))
            return q.new_zeros(*q.shape[:-1], v.shape[-1])

        return recorded

    adapter.register()
    with (
        mock.patch.object(attention, "attention", recorder(attention.attention)),
        mock.patch.object(packed, "varlen_attention", recorder(packed.varlen_attention)),
        mock.patch.object(paged, "varlen_attention", recorder(paged.varlen_attention)),
        mock.patch.object(step, "decode", recorder(step.decode)),
        mock.patch.object(blocks, "decode", recorder(blocks.decode)),
    ):
        yield recorded_calls


def calls() -> Iterator[Callable[[], Any]]:
    """Each call that the tests make, as a function that makes it on "meta", with its backward pass if there is one."""
    with recording() as recorded_calls:
        for run in _runs():
            with torch.enable_grad():
                run()
            yield from recorded_calls
            recorded_calls.clear()
    yield from _of_generation()


def _runs() -> Iterator[Callable[[], Any]]:
    """What the tests run of tileattn."""
    _, dtype, size = DEVICES[1].values[0]
    device = ("cpu", dtype, size)
    for name, kind in MODELS.items():
        for pad in ("none", "left"):  # to the kernels, right is as left
            yield lambda kind=kind, pad=pad: Problem(kind, device, pad).run("tileattn")  # type: ignore[misc]
        for how in (how for packed_name, how in PACKED if packed_name == name):
            yield lambda kind=kind, how=how: PackedProblem(kind, device, how).run("tileattn")  # type: ignore[misc]
    for name, cache in GENERATIONS:
        yield lambda name=name, cache=cache: Decoding(name, device).generate(  # type: ignore[misc]
            "tileattn", cache_implementation=cache
        )
    for name in ("llama", "mistral"):
        yield lambda name=name: generate_batch(  # type: ignore[misc]
            MODELS[name].build(size).to(dtype), f"paged|{adapter.NAME}"
        )
    for name in CHUNKED:
        for cache in ("dynamic", "static"):
            for pad in ("none", "left"):
                yield lambda name=name, cache=cache, pad=pad: _prefill(  # type: ignore[misc]
                    Problem(MODELS[name], device, pad), cache
                )


def _of_generation() -> Iterator[Callable[[], Any]]:
    """Prefill and steps of a model with head dim 128, in bfloat16; on a GPU every call has a padding mask."""
    shapes = ((1, 1, 32, 128), (1, 600, 32, 128), (1, 600, 8, 128))
    one, many, keys = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    padding = KeyPadding(torch.empty(1, 600, dtype=torch.bool, device="meta"))
    lengths = torch.empty(1, dtype=torch.int32, device="meta")
    for mask in (None, padding):
        for q in (one, many):
            yield functools.partial(tileattn.attention, q, keys, keys, causal=q is many, mask=mask)
        yield functools.partial(tileattn.decode, one, keys, keys, lengths, mask=mask)
    yield functools.partial(tileattn.attention, one, keys, keys, causal=True)


def _prefill(problem: Problem, cache: str) -> Tensor:
    places = torch.arange(problem.counts.shape[1]).expand_as(problem.counts)
    return prefill(problem, places, cache)


def _on_meta(function: Callable[..., Any], arguments: Any, options: dict[str, Any]) -> Callable[[], Any]:
    """The same call on "meta"."""
    grad = torch.is_grad_enabled()
    moved = [_moved(x) for x in arguments]
    mask, mods = normalize(options.get("mask"), options["score_mod"], False)
    key, operands = encode(mask, mods)
    tensors = [_moved(x) for x in operands.tensors]
    mask, mods = decode(key, Operands(tensors, operands.ints, operands.floats))
    named = {name: _moved(value) for name, value in options.items()} | {"mask": mask, "score_mod": mods or None}
    leaves = [x for x in (*moved, *tensors, *named.values()) if isinstance(x, Tensor) and x.requires_grad]

    def attempt() -> None:
        with torch.set_grad_enabled(grad):
            o = function(*moved, **named)
            if grad and leaves:
                torch.autograd.grad(o, leaves, torch.ones_like(o))

    return attempt


def _moved(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().to("meta").requires_grad_(value.requires_grad)
