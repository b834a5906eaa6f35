"""Masks as ranges of queries for each key, and the bits of a thread's columns: evaluated without a GPU, on constants.

The kernel's expressions get constants and tensors with values; their results are compared with the mask's `allows`.
"""

from __future__ import annotations

import operator
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("tilelang")

import tilelang.language as T

from tests.kernels.tilelang.backward.test_lowering import backward_of
from tests.tools.lowering import IDS, make_call
from tileattn import Causal, Documents, FunctionMask, KeyPadding, Mask, PrefixLM, SlidingWindow, SoftCap
from tileattn.kernels.tilelang.backward.config import read_together
from tileattn.kernels.tilelang.backward.defaults import default
from tileattn.kernels.tilelang.backward.hopper.config import HopperBackwardConfig
from tileattn.kernels.tilelang.backward.hopper.query_words import range_of_key
from tileattn.kernels.tilelang.backward.kernels import kernel_of
from tileattn.kernels.tilelang.backward.query_range import is_exact, is_known, reads_memory
from tileattn.kernels.tilelang.backward.visible import Viewers
from tileattn.kernels.tilelang.build.compile import device_source
from tileattn.kernels.tilelang.tile.expressions import Emitter
from tileattn.kernels.tilelang.tile.key_words import columns_below
from tileattn.variant.key import encode
from tileattn.variant.program import Program, program

SEQLEN_K, BLOCK_N = 40, 16
LARGEST = 2**30 - 1
ADJACENT = torch.tensor([7] * 11 + [-2] * 3 + [5] * 17 + [9] * 9)


def value_of(expr: Any) -> int:
    """The value of an expression of constants, not all of which TVM folds."""
    names = SimpleNamespace(
        bool=bool,
        int32=int,
        int64=int,
        min=min,
        max=max,
        bitwise_or=operator.or_,
        bitwise_and=operator.and_,
        shift_left=operator.lshift,
        if_then_else=lambda condition, x, y: x if condition else y,
        Cast=lambda dtype, value: int(value),
    )
    return int(eval(str(expr), {"T": names}))


class Tensor:
    """A tensor whose elements are constants of TileLang; an index outside is an error, as it would be on a GPU."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values, self.shape = values, values.shape
        self.dtype = "uint8" if values.dtype == torch.bool else "int32"

    def __getitem__(self, indices: tuple[Any, ...]) -> Any:
        place = [value_of(index) for index in indices]
        assert all(0 <= i < size for i, size in zip(place, self.shape)), place
        return T.IntImm(self.dtype, int(self.values[tuple(place)]))


def traced(mask: Mask) -> Program:
    return program(encode(mask, ())[0])


def viewers(mask: Mask, seqlen_q: int) -> Viewers:
    key, operands = encode(mask, ())
    values: dict[str, Any] = {f"i{n}": T.int32(value) for n, value in enumerate(operands.ints)}
    values |= {f"t{n}": Tensor(tensor) for n, tensor in enumerate(operands.tensors)}
    return Viewers(program(key), Emitter(values), T.int32(seqlen_q), T.int32(SEQLEN_K))


def rows_that_see(mask: Mask, k: int, seqlen_q: int) -> list[int]:
    """By the mask's own evaluation; none behind the last key."""
    if k >= SEQLEN_K:
        return []
    q = torch.arange(seqlen_q) + SEQLEN_K - seqlen_q
    seen = torch.as_tensor(mask.allows(torch.tensor(0), torch.tensor(0), q, torch.tensor(k)))
    return seen.expand(seqlen_q).nonzero().flatten().tolist()


MASKS = {
    "causal": Causal(),
    "window": SlidingWindow(5, 3),
    "window-left": SlidingWindow(4, None),
    "window-right": SlidingWindow(None, 2),
    "window-widest": SlidingWindow(LARGEST, LARGEST),
    "causal-window": Causal() & SlidingWindow(7, None),
    "prefix": PrefixLM(9),
    "prefix-by-batch": PrefixLM(torch.tensor([9])),
    "documents": Documents(ADJACENT),
    "documents-causal": Documents(ADJACENT) & Causal(),
    "documents-window": Documents(ADJACENT) & SlidingWindow(6, 2),
    "padding": KeyPadding((torch.arange(SEQLEN_K) < 31)[None]),
}


@pytest.mark.parametrize("seqlen_q", [SEQLEN_K, 13, 57])
@pytest.mark.parametrize("name", MASKS)
def test_one_range_of_queries_sees_a_key(name: str, seqlen_q: int) -> None:
    """Also where queries begin before the first key, and for keys behind the last one, for which nothing is read."""
    mask = MASKS[name]
    visible = viewers(mask, seqlen_q)
    for k in range(SEQLEN_K + BLOCK_N):
        lo, hi, whole = range_of_key(visible, T.int32(0), T.int32(0), T.int32(k))
        lo, hi = value_of(lo), value_of(hi)
        assert value_of(whole), k
        assert lo >= 0  # a negative one means that the key has none
        assert hi <= seqlen_q
        assert list(range(lo, hi)) == rows_that_see(mask, k, seqlen_q), k


def test_keys_that_no_single_range_sees() -> None:
    """Ids in any order; of two documents, one of them in one piece; padding within the kept keys."""
    pieces = torch.tensor([1] * 10 + [2] * 10 + [1] * 10 + [3] * 10)
    cases: tuple[tuple[Mask, list[int]], ...] = (
        (Documents(torch.arange(SEQLEN_K) % 3), []),
        (Documents(pieces), [*range(30, 40)]),
        (KeyPadding((torch.arange(SEQLEN_K) % 10 < 7)[None]), [*range(7), *range(37, 40)]),
        (FunctionMask(lambda b, h, q, k: (q - k) % 2 == 0), []),
    )
    for mask, known in cases:
        visible = viewers(mask, SEQLEN_K)
        found = []
        for k in range(SEQLEN_K):
            lo, hi, whole = range_of_key(visible, T.int32(0), T.int32(0), T.int32(k))
            if value_of(whole):
                found.append(k)
                assert list(range(value_of(lo), value_of(hi))) == rows_that_see(mask, k, SEQLEN_K), (mask, k)
        assert set(known) <= set(found), mask
        assert len(found) < SEQLEN_K, mask


@pytest.mark.parametrize("columns", [64, 80, 128])
def test_words_of_a_tile(columns: int) -> None:
    """Of each of a thread's columns 2t, 2t + 1 of each eight, the bit says whether the query sees the key."""
    mask, seqlen_q = MASKS["documents-causal"], 57
    visible = viewers(mask, seqlen_q)
    for k, row in ((0, 0), (12, 0), (13, columns), (30, 0), (39, columns)):
        lo, hi, _ = range_of_key(visible, T.int32(0), T.int32(0), T.int32(k))
        seen = rows_that_see(mask, k, seqlen_q)
        for t in range(4):
            first = row + 2 * t
            word = value_of(columns_below(hi - first)) & ~value_of(columns_below(lo - first))
            bits = [word >> j & 1 for j in range(columns // 4)]
            assert bits == [int(first + j // 2 * 8 + j % 2 in seen) for j in range(columns // 4)], (k, row, t)


def test_what_is_told_by_expressions_alone() -> None:
    """Windows: in each masked tile, without memory or a vote. Documents: once, and kept."""
    exact = {name for name, mask in MASKS.items() if is_exact(traced(mask))}
    assert exact == {name for name in MASKS if "documents" not in name and name != "padding"}
    assert {name for name, mask in MASKS.items() if reads_memory(traced(mask))} == {
        "prefix-by-batch",
        "documents",
        "documents-causal",
        "documents-window",
        "padding",
    }
    known = {name for name, mask in MASKS.items() if is_known(traced(mask))}
    assert known == set(MASKS) - {"prefix", "prefix-by-batch", "padding"}
    assert not is_known(traced(Documents(ADJACENT) | SlidingWindow(3, 0)))
    assert not is_known(traced(FunctionMask(lambda b, h, q, k: (q - k) % 2 == 0)))
    assert not is_known(program(""))


def test_which_calls_hide_by_words() -> None:
    for dim in (64, 96, 128):
        for mask in (IDS, IDS & Causal(), IDS & SlidingWindow(5, 0), SlidingWindow(5, 0)):
            config = default(backward_of(make_call(mask, dim=dim)))
            assert isinstance(config, HopperBackwardConfig)
            assert config.mask_words
    others = (
        make_call(),
        make_call(Causal()),
        make_call(IDS & Causal(), SoftCap(9.0)),
        make_call(IDS, dropout=True),
        make_call(FunctionMask(lambda b, h, q, k: (q + k) % 3 != 0)),
    )
    for call in others:
        config = default(backward_of(call))
        assert isinstance(config, HopperBackwardConfig)
        assert not config.mask_words
    no_mask = read_together(backward_of(make_call()))
    assert not HopperBackwardConfig(64, mask_words=True).is_valid(no_mask)


@pytest.mark.slow_cases("window", reason="lowers a kernel, 4 s")
@pytest.mark.parametrize("name", ["window", pytest.param("documents", marks=pytest.mark.slow)])  # 3 s each
def test_code(name: str) -> None:
    """Windows compare no score. A warp's 16 keys are found by the warp itself, between two barriers of its own."""
    mask = SlidingWindow(5, 0) if name == "window" else IDS & Causal()
    call = backward_of(make_call(mask, dim=64))
    body = device_source(kernel_of(call, "main", default(call)), "sm_90a").partition("__global__")[2]
    assert len(re.findall(r"fence_operand\(reinterpret_cast<uint32_t\*>\(\w+ \+ 0\), 2\)", body)) == 1
    assert ("bool seen" in body) == ("__any_sync" in body) == (name == "documents")
    kept = re.findall(r"__shared__.* int \w+\[256\]", body)
    assert (body.count("__syncwarp"), len(kept)) == ((0, 0) if name == "window" else (2, 1))
