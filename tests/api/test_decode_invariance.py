"""FixedSplit: the bits of a row are the same whatever it is decoded with, in whatever memory, one by one or together.

The reference is each query alone, at q_len 1, with a contiguous cache. Neighbours, their order, page sizes, strides,
capacities, q_len, packing, a prefill beside it and a plan made ahead must not change a bit of o or lse.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import tileattn
from tests.tools.cached_sequences import Cache, Heads, Rows, Sequence, arguments_of, decoded, draw, split
from tests.tools.decode_call import EVERYWHERE
from tileattn import ALiBi, FixedSplit, SlidingWindow, SoftCap
from tileattn.kernels.tilelang.decode import launch
from tileattn.kernels.tilelang.decode.config import generic_default
from tileattn.tuner.state import forget_prepared

BF16, FP16 = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Scene:
    """A sequence of `length` keys, of which the last 16 queries are decoded.

    Attributes:
        heads, kv_heads, head_dim, head_dim_v, dtype: of the tensors.
        length: the keys of the sequence.
        keys: those of the FixedSplit.
        options: the variant, of the device.
    """

    heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    length: int
    keys: int
    options: Callable[[str], dict[str, Any]] = lambda device: {}


SCENES = {
    "plain": Scene(8, 2, 128, 128, BF16, 777, 128),
    "long": Scene(4, 1, 64, 64, FP16, 2049, 1024),
    "one group of 16": Scene(16, 1, 128, 128, FP16, 600, 256),
    "no group": Scene(3, 3, 64, 64, BF16, 385, 128),
    "group of 128": Scene(128, 1, 64, 64, BF16, 300, 128),
    "head dims": Scene(6, 2, 192, 128, BF16, 500, 256),
    "256": Scene(4, 2, 256, 256, FP16, 513, 128),
    "window": Scene(
        8, 2, 128, 128, BF16, 700, 128, lambda device: {"mask": SlidingWindow(300, 0), "score_mod": SoftCap(5.0)}
    ),
    "sink": Scene(
        8, 2, 64, 64, FP16, 640, 128,
        lambda device: {
            "sink": torch.linspace(-1, 2, 8, device=device),
            "score_mod": ALiBi(torch.linspace(0.01, 0.1, 8, device=device)),
        },
    ),
    "function": Scene(
        8, 2, 64, 64, BF16, 641, 128,
        lambda device: {
            "mask": lambda b, h, q, k: (k % 3 != 1) | (k == q),
            "score_mod": lambda score, b, h, q, k: score - 0.01 * (q - k),
        },
    ),
    # Tiles between others are hidden, by other queries and heads other ones.
    "gaps": Scene(
        8, 2, 64, 64, BF16, 641, 128,
        lambda device: {"mask": lambda b, h, q, k: (k < 70) | ((q - k) % 200 < 30 + 5 * h)},
    ),
}  # fmt: skip
GENERIC = ("plain", "window", "gaps")  # those that run on the generic schedule as well
QUERIES = 16


@pytest.mark.slow_cases(
    "torch-plain",
    "torch-no group",
    "torch-group of 128",
    "torch-256",
    "torch-sink",
    "torch-gaps",
    "torch-long",
    "torch-head dims",
    reason="1 s each",
)
@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize(("backend", "device"), EVERYWHERE)
def test_bits_do_not_depend_on_the_company(name: str, backend: str, device: str) -> None:
    if backend == "torch" and device == "cuda":
        pytest.skip("refused: PyTorch's products depend on the batch")
    assert changed_situations(SCENES[name], backend, device) == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", GENERIC)
def test_bits_of_the_generic_schedule_do_not_depend_on_the_company(name: str) -> None:
    with generic_schedule():
        assert changed_situations(SCENES[name], "tilelang", "cuda") == []


@contextmanager
def generic_schedule() -> Iterator[None]:
    """Inside, the tilelang backend takes its generic schedule on Hopper as well."""
    forget_prepared()
    try:
        with mock.patch.object(launch, "default", generic_default):
            yield
    finally:
        forget_prepared()


def changed_situations(scene: Scene, backend: str, device: str) -> list[str]:
    """The situations in which a bit differs from that of each query alone."""
    sizes = Heads(scene.heads, scene.kv_heads, scene.head_dim, scene.head_dim_v, scene.dtype, device)
    mine = draw(sizes, scene.length, 0)
    begin = scene.length - QUERIES
    options = {"splits": FixedSplit(scene.keys), "backend": backend, **scene.options(device)}
    alone = [decoded([Rows(mine, begin + row, 1)], Cache(), **options)[0] for row in range(QUERIES)]
    o, lse = torch.cat([o for o, _ in alone]), torch.cat([lse for _, lse in alone], dim=1)
    assert o.isfinite().all()
    changed = []
    for situation, first, (got_o, got_lse) in situations(mine, sizes, begin, options):
        rows = slice(first - begin, first - begin + got_o.shape[0])
        if not torch.equal(got_o, o[rows]) or not torch.equal(got_lse, lse[:, rows]):
            changed.append(situation)
    return changed


def situations(
    mine: Sequence, sizes: Heads, begin: int, options: dict[str, Any]
) -> Iterator[tuple[str, int, tuple[Tensor, Tensor]]]:
    """(what it is, the first position, results) of the sequence in different company."""
    last = begin + QUERIES - 1
    others = [draw(sizes, length, seed) for seed, length in enumerate((900, 1, 130, 385, 40, 257), 1)]
    one = [Rows(mine, last, 1)]
    yield "alone again", last, decoded(one, Cache(), **options)[0]
    yield "a larger capacity", last, decoded(one, Cache(slack=1000), **options)[0]
    for page in (16, 64, 1, 3, 256):
        yield f"pages of {page}", last, decoded(one, Cache(page, slack=99), **options)[0]
    yield "other pages", last, decoded(one, Cache(16, seed=5), **options)[0]
    yield "other strides", last, decoded(one, Cache(64, heads_first=True), **options)[0]
    yield "other strides, contiguous", last, decoded(one, Cache(heads_first=True), **options)[0]
    # Several queries at a time.
    for count in (2, 5, QUERIES):
        several = [Rows(mine, last + 1 - count, count)]
        for page in (0, 16):
            yield f"{count} queries, pages of {page}", last + 1 - count, decoded(several, Cache(page), **options)[0]
    yield "16 queries, packed", begin, decoded([Rows(mine, begin, QUERIES)], Cache(64, packed=True), **options)[0]
    yield "an earlier step", last - 3, decoded([Rows(mine, last - 3, 1)], Cache(16), **options)[0]
    # Neighbours.
    near = [Rows(other, other.q.shape[0] - 1, 1) for other in others]
    yield "first of a batch", last, decoded([*one, *near], Cache(16), **options)[0]
    yield "last of a batch", last, decoded([*near, *one], Cache(16), **options)[-1]
    yield "in a permuted batch", last, decoded([*near[3:], *one, *near[:3]], Cache(64, seed=3), **options)[3]
    yield "in another batch", last, decoded([near[1], *one, near[4]], Cache(), **options)[1]
    yield "twice", last, decoded([*one, near[0], *one], Cache(16), **options)[2]
    # Prefills beside it.
    for count in (9, 10, 130):
        prefill = Rows(others[0], 200, count)
        for page in (0, 16, 64):
            cache = Cache(page, packed=True)
            yield f"beside {count} queries, pages of {page}", last, decoded([prefill, *one], cache, **options)[1]
    mixed = [Rows(others[3], 0, 63), Rows(mine, begin, QUERIES), *near[:3], Rows(others[5], 3, 70)]
    yield "16 queries in a mix", begin, decoded(mixed, Cache(16, packed=True), **options)[1]
    # A plan made ahead; o alone.
    wanted, cache = [near[2], *one, near[0]], Cache(16)
    positional, named = arguments_of(wanted, cache)
    plan = tileattn.decode_plan(*positional, **named, **options)
    o, lse = tileattn.decode(*positional, **named, **options, plan=plan, return_lse=True)
    yield "with a plan", last, split(wanted, cache, o, lse)[1]
    o = tileattn.decode(*positional, **named, **options)
    yield "without lse", last, split(wanted, cache, o, lse)[1]


def test_a_change_of_a_bit_is_seen() -> None:
    """The torch backend without FixedSplit is no reference for bits: some situation differs, and would be found."""
    scene = SCENES["plain"]
    sizes = Heads(scene.heads, scene.kv_heads, scene.head_dim, scene.head_dim_v, scene.dtype, "cpu")
    mine, last = draw(sizes, scene.length, 0), scene.length - 1
    options = {"backend": "torch"}
    one, _ = decoded([Rows(mine, last, 1)], Cache(), splits=1, **options)[0]
    seven, _ = decoded([Rows(mine, last, 1)], Cache(), splits=7, **options)[0]
    lse = [decoded([Rows(mine, last, 1)], Cache(), splits=splits, **options)[0][1] for splits in (1, 2, 3, 5, 7)]
    assert not torch.equal(one, seven) or any(not torch.equal(lse[0], each) for each in lse)


def calls() -> Iterator[Callable[[], Any]]:
    """Calls whose kernels these tests need on a GPU, for benchmarks/precompile.py."""
    for scene in SCENES.values():
        yield from calls_of(scene)
    for name in GENERIC:
        for call in calls_of(SCENES[name]):
            yield functools.partial(on_generic_schedule, call)


def on_generic_schedule(call: Callable[[], Any]) -> Any:
    with generic_schedule():
        return call()


def calls_of(scene: Scene) -> Iterator[Callable[[], Any]]:
    """Those of a scene."""
    sizes = Heads(scene.heads, scene.kv_heads, scene.head_dim, scene.head_dim_v, scene.dtype, "meta")
    rows = [Rows(draw(sizes, 20, seed), 4, QUERIES) for seed in (0, 1)]
    options = {"splits": FixedSplit(scene.keys), "backend": "tilelang", **scene.options("meta")}
    for page, packed in ((0, False), (1, False), (16, False), (64, False), (0, True), (16, True), (64, True)):
        yield functools.partial(decoded, rows, Cache(page, packed), **options)
    positional, named = arguments_of(rows, Cache(16))
    yield functools.partial(tileattn.decode, *positional, **named, **options)
