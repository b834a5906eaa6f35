"""Triton's kernels with lists of tiles, in Triton's interpreter: what they compute, and which tiles they visit.

test_lists_gpu.py has long calls on a GPU; tests/kernels/tilelang/test_tile_lists.py looks at the lists themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tileattn
from tests.kernels.triton.test_backend import check, tensor
from tests.tools.triton_kernels.visits import count_visits
from tileattn import (
    ALiBi,
    Bias,
    BlockSparse,
    Causal,
    Dilated,
    FunctionMask,
    GlobalTokens,
    ImageTextDocuments,
    Mask,
    Neighborhood,
    SlidingWindow,
    Strided,
)
from tileattn.call.facts import AttentionCall
from tileattn.kernels import kept_lists
from tileattn.kernels.tile_lists import Cut, is_listed
from tileattn.math import load
from tileattn.tuner.state import forget_prepared
from tileattn.variant.key import encode

pytest.importorskip("triton")
from tileattn.kernels.triton import defaults, lists, plan
from tileattn.kernels.triton.forward.launch import Forward
from tileattn.kernels.triton.tile_sizes import KERNELS, Config

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="counts what Triton's interpreter does")

LENGTHS = {"more-keys": (34, 45), "more-queries": (45, 34)}
HEADS, KV_HEADS, BATCH, LONGEST = 2, 1, 2, 45
IDS = torch.tensor([0] * 14 + [1] * 5 + [2] * 17 + [3] * 9)
IMAGES = torch.tensor(([-1] * 4 + [0] * 7) * 6)[:LONGEST]
WINDOWS = torch.tensor([7, 30], dtype=torch.int32)
F32 = torch.float32
LIMITS = torch.tensor([30, 13], dtype=torch.int32)
BLOCKS = torch.arange(2 * 2 * 3 * 3).reshape(2, 2, 3, 3) % 4 != 1
# Rows of tiles without a tile, and columns of them: blocks 1.
BLOCKS[:, :, 1], BLOCKS[..., 1] = False, False

MASKS: dict[str, Mask] = {
    "dilated": Dilated(20, dilation=3),
    "strided": Strided(16, 7),
    "local-global": SlidingWindow(4, 3) | GlobalTokens(5),
    "neighborhood": Neighborhood((6, 7), (3, 3)),
    "blocks": BlockSparse(BLOCKS, (16, 16)),
    "by-head": Causal() & FunctionMask(lambda b, h, q, k: q - k <= load(WINDOWS, h)),
    "by-batch": FunctionMask(lambda b, h, q, k: (k < load(LIMITS, b)) & (abs(q - k) < 20)),
    "ids": FunctionMask(lambda b, h, q, k: load(IDS, q) == load(IDS, k)),
    # The first rows see nothing, and nothing sees the last keys.
    "far": FunctionMask(lambda b, h, q, k: q - k >= 27),
    "nothing": FunctionMask(lambda b, h, q, k: (k > q) & (k < q)),
    "everything": FunctionMask(lambda b, h, q, k: k >= 0),
}
# By the short tests: each kind of step in a line, empty rows and columns. The others are marked `slow`.
SHORT = {("blocks", "more-keys"), ("by-head", "more-queries")}
CASES = [
    pytest.param(name, lengths, marks=() if (name, lengths) in SHORT else pytest.mark.slow)
    for name in (*MASKS, "images-text")
    for lengths in LENGTHS
]


def forget() -> None:
    """Prepared calls and plans do not know of other limits."""
    forget_prepared()
    plan.make_plan.cache_clear()
    kept_lists.forget_lists()


@pytest.fixture(autouse=True)
def _short_calls_have_lists(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In tiles of 16 by 16, two of which are one of a list along the side that a loop walks over."""
    monkeypatch.setattr(lists, "FEWEST_PAIRS", 1)
    monkeypatch.setattr(lists, "LEAST_BLOCK", 16)
    forget()
    with defaults.overridden(**{name: Config(16, 16, 4, 1) for name in KERNELS}):
        yield
    forget()


class Counted(NamedTuple):
    """Of the programs of a kernel: products of tiles, and tiles in which the mask is evaluated."""

    products: int
    masked: int


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Counted]:
    """Counts what a function does."""
    from tileattn.kernels.triton.backward import kernels
    from tileattn.kernels.triton.forward import kernel

    count = count_visits(monkeypatch, kernel, kernels)

    def run(function: Callable[[], Any]) -> Counted:
        count.update(products=0, masked=0)
        function()
        return Counted(**count)

    return run


def inputs(lengths: str, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor, Tensor]:
    seqlen_q, seqlen_k = LENGTHS[lengths]
    q = tensor(BATCH, seqlen_q, HEADS, 16, dtype=dtype)
    k, v = (tensor(BATCH, seqlen_k, KV_HEADS, 16, dtype=dtype, seed=seed) for seed in (1, 2))
    return q, k, v


def attention(mask: Mask, *mods: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return tileattn.attention(q, k, v, mask=mask, score_mod=list(mods) or None, return_lse=True, backend="triton")

    return run


# --- What they compute ---


@pytest.mark.slow_cases("blocks-more-keys", reason="1.3 s in Triton's interpreter")
@pytest.mark.parametrize(("name", "lengths"), CASES)
def test_outputs_and_gradients(name: str, lengths: str) -> None:
    seqlen_k = LENGTHS[lengths][1]
    mask = ImageTextDocuments(IDS[:seqlen_k], IMAGES[:seqlen_k]) if name == "images-text" else MASKS[name]
    check(name, attention(mask), *inputs(lengths), mask)
    assert kept_lists._kept, "neither pass took lists"


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("far", 32),
        *(pytest.param(name, least, marks=pytest.mark.slow) for name in ("strided", "by-head") for least in (32, 64)),
    ],
)
def test_tiles_of_lists_that_are_several_of_a_kernel(name: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "LEAST_BLOCK", least)
    check(name, attention(MASKS[name]), *inputs("more-keys"), MASKS[name])


@pytest.mark.slow
def test_float32() -> None:
    check("float32", attention(MASKS["ids"]), *inputs("more-keys", F32), MASKS["ids"])


@pytest.mark.slow
def test_gradients_of_what_a_modification_reads() -> None:
    """Of each score, and one sum for each key: hidden tiles have none."""
    mask = MASKS["strided"]
    more = (tensor(*shape, dtype=F32, seed=7) for shape in ((1, 2, 34, 45), (2,)))
    every = (*inputs("more-keys", F32), *more)
    runs = []
    for backend in ("triton", "torch"):
        leaves = [x.clone().requires_grad_() for x in every]
        mods = [Bias(leaves[3]), ALiBi(leaves[4])]
        o = tileattn.attention(*leaves[:3], mask=mask, score_mod=mods, backend=backend)
        runs.append((o, *torch.autograd.grad(o.square().sum(), leaves)))
    for got, expected in zip(*runs):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_rows_and_columns_without_tiles() -> None:
    q, k, v = (x.requires_grad_() for x in inputs("more-queries"))
    o, lse = attention(MASKS["far"])(q, k, v)
    dq, dk, dv = torch.autograd.grad(o.sum(), (q, k, v))
    first = 27 + len(q[0]) - len(k[0])  # the first query that sees a key
    assert (o[:, :first] == 0).all()
    assert (lse[:, :, :first] == -torch.inf).all()
    assert (dq[:, :first] == 0).all()
    assert lse[:, :, first:].isfinite().all()
    for grad in (dk, dv):
        assert (grad[:, len(k[0]) - 27 :] == 0).all()
        assert (grad[:, : len(k[0]) - 27] != 0).any(-1).all()


@pytest.mark.slow  # lists that are found again have tests of their own
def test_a_write_in_place_is_seen() -> None:
    table = WINDOWS.clone()
    mask = Causal() & FunctionMask(lambda b, h, q, k: q - k <= load(table, h))
    tensors = inputs("more-keys")
    before = attention(mask)(*tensors)[0]
    table.fill_(3)
    other = Causal() & SlidingWindow(3, None) & FunctionMask(lambda b, h, q, k: k >= 0)
    after = attention(mask)(*tensors)[0]
    assert torch.equal(after, attention(other)(*tensors)[0])
    assert not torch.equal(after, before)


# --- Which tiles they visit ---


def exact(mask: Mask, lengths: str, block: int) -> tuple[int, int]:
    """Steps of the kernel's loops that visit tiles of lists, and those with a mask, from every pair of all heads."""
    seqlen_q, seqlen_k = LENGTHS[lengths]
    q, k = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q, torch.arange(seqlen_k)[None]
    visited = mixed = 0
    for b in range(BATCH):
        for h in range(HEADS):
            pairs = torch.as_tensor(mask.allows(torch.tensor(b), torch.tensor(h), q, k)).expand(seqlen_q, seqlen_k)
            for rows in pairs.split(block):
                steps = -(-len(rows) // 16) * block // 16
                for tile in rows.split(block, dim=1):
                    visited += steps * bool(tile.any())
                    mixed += steps * (bool(tile.any()) and not bool(tile.all() and tile.shape[1] == block))
    return visited, mixed


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("by-head", 1),
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ("local-global", "ids", "far")),
        pytest.param("far", 2, marks=pytest.mark.slow),
    ],
)
def test_the_forward_pass_visits_what_is_not_hidden(
    name: str, steps: int, counted: Callable[..., Counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two products a tile, and a mask in mixed ones; of a tile of a list, every tile of the kernel's in it."""
    monkeypatch.setattr(lists, "LEAST_BLOCK", 16 * steps)
    tensors = inputs("more-keys")
    visited, mixed = exact(MASKS[name], "more-keys", 16 * steps)
    assert counted(lambda: attention(MASKS[name])(*tensors)) == (2 * visited, mixed)
    monkeypatch.setattr(lists, "FEWEST_PAIRS", 2**62)
    forget()
    assert counted(lambda: attention(MASKS[name])(*tensors)).products > 2 * visited


def test_the_backward_pass_visits_what_is_not_hidden(counted: Callable[..., Counted]) -> None:
    """Three products a tile for dq, and four for dk and dv, whose last rows of tiles have a mask as well."""
    name = "by-head"
    leaves = [x.requires_grad_() for x in inputs("more-queries")]
    o, _ = attention(MASKS[name])(*leaves)
    visited, _ = exact(MASKS[name], "more-queries", 16)
    assert counted(lambda: torch.autograd.grad(o.sum(), leaves)).products == 7 * visited


# --- Which calls take lists, and how they are cut ---

CALL = AttentionCall(torch.float16, 64, 64, arch="sm_90a")


def shapes(batch: int, seqlen_q: int, seqlen_k: int, heads: int) -> tuple[torch.Size, torch.Size]:
    return torch.Size((batch, seqlen_q, heads, 64)), torch.Size((batch, seqlen_k, heads, 64))


def test_long_calls_of_masks_with_gaps_take_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the dtype, the batch size and the number of heads."""
    monkeypatch.undo()
    long, short = shapes(1, 2048, 8192, 1), shapes(64, 2048, 8191, 64)
    for name, mask in (MASKS | {"window": SlidingWindow(5, 5)}).items():
        key = encode(mask, [])[0]
        if name == "blocks":  # no key before a call has replaced it
            continue
        for dtype in (torch.float16, torch.float32):
            call = dataclasses.replace(CALL, variant=key, dtype=dtype)
            assert lists.pays(call, *long) == is_listed(key) == (name != "window")
            assert not lists.pays(call, *short)
    assert not lists.pays(CALL, *long)


@pytest.mark.parametrize(
    ("kernel", "config", "cut", "walk"),
    [
        ("forward", (64, 128), Cut(64, 128), (1, 64)),
        ("queries", (128, 32), Cut(128, 64), (2, 128)),
        ("forward", (16, 16), Cut(64, 64), (4, 64)),
        ("keys", (128, 64), Cut(128, 64, by_keys=True, masks_queries=True), (1, 64)),
        ("keys", (16, 32), Cut(64, 64, by_keys=True, masks_queries=True), (4, 64)),
        ("keys", (32, 128), Cut(64, 128, by_keys=True, masks_queries=True), (2, 128)),
    ],
)
def test_cuts(
    kernel: str, config: tuple[int, int], cut: Cut, walk: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    of_kernel = Config(*config, 4, 2)
    assert lists.cut_of(kernel, of_kernel) == cut
    assert lists.walk_of(kernel, of_kernel) == walk


def test_a_call_by_ranges_has_no_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel gets None in their places, and is compiled without them."""
    monkeypatch.undo()
    q, k, _ = inputs("more-keys")
    call = dataclasses.replace(CALL, head_dim=16, head_dim_v=16, arch="cpu", variant=encode(MASKS["dilated"], [])[0])
    forward = Forward(call, q.shape, k.shape, 0.25)
    assert forward.cut is None
    of = plan.make_plan(call, forward.config, "forward", 0)
    assert (of.listed.value, of.line_rows.value, of.step_N.value) == (0, 0, forward.config.block_N)
    assert lists.of_lists(call.variant, encode(MASKS["dilated"], [])[1], forward.sizes, None, q.device) == (None,) * 4
