"""Every backend's refusal of decode calls, and dispatch's choice, beside the table that says what must run."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

import tileattn
from tests.tools.support_table import (
    ANY,
    BF16,
    DECODE_TABLE,
    FP16,
    FP32,
    FP64,
    check_decode_refusal,
    default_decode_backend,
    possible,
)
from tileattn import ALiBi, Bias, Causal, Documents, FixedSplit, SlidingWindow, SoftCap
from tileattn.call.decoding import DecodeCall
from tileattn.runtime.dispatch import BACKENDS, select_decode
from tileattn.variant.key import encode
from tileattn.variant.tree_mask import TreeMask

HEAD_DIMS = [(d, d) for d in (1, 8, 12, 15, 16, 24, 40, 64, 100, 128, 192, 248, 256, 257, 264, 512)]
HEAD_DIMS += [(192, 128), (64, 128), (100, 64), (64, 8), (264, 64), (256, 512)]
IDS, SLOPES, BIAS = torch.zeros(8, dtype=torch.int32), torch.ones(8), torch.zeros(1, 8, 8, 8)
TREE = TreeMask(torch.ones(2, 4, 4, dtype=torch.bool), torch.zeros(2, dtype=torch.int32))
VARIANTS: list[tuple[Any, tuple[Any, ...]]] = [
    (Causal(), ()),
    (Causal() & SlidingWindow(5, 0), (SoftCap(3.0),)),
    (Documents(IDS), (ALiBi(SLOPES),)),
    (TREE, (Bias(BIAS),)),
    (TREE & SlidingWindow(5, 0), (lambda score, b, h, q, k: score - 0.1 * (q - k),)),
    (Causal(), (Bias(BIAS.double()),)),
]
FLAGS: list[dict[str, Any]] = [
    {},
    {"page_rows": 16},
    {"page_rows": 1, "packed": True},
    {"page_rows": 64, "fixed": 1024},
    {"fixed": 128, "packed": True, "sink": True},
    {"aligned": False},
    {"aligned": False, "page_rows": 2, "fixed": 128},
    {"return_lse": False, "sink": True},
    {"packed": True, "packed_keys": True},
]


@functools.cache
def calls(arch: str) -> tuple[DecodeCall, ...]:
    """Every dtype, head dim and flag, causal; every variant with some of them."""
    causal = encode(Causal(), ())[0]
    plain = itertools.product((FP16, BF16, FP32, FP64), FLAGS, HEAD_DIMS, ("", causal))
    keys = [encode(mask, mods)[0] for mask, mods in VARIANTS]
    varied = itertools.product((FP16, BF16, FP32, FP64), FLAGS, [(64, 64), (100, 100)], keys)
    return tuple(
        DecodeCall(dtype, dim, dim_v, key, arch=arch, **flags)
        for dtype, flags, (dim, dim_v), key in itertools.chain(plain, varied)
    )


@pytest.mark.parametrize("arch", ANY)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_backend_decodes_what_it_must_and_nothing_else(backend: Any, arch: str) -> None:
    if not possible(backend.name, arch):
        pytest.skip(f"this process has not what {backend.name} needs on {arch}")
    for call in calls(arch):
        reason = "it does not decode" if backend.decode is None else backend.decode.refusal(call)
        check_decode_refusal(backend.name, call, reason)


def test_every_backend_has_rows() -> None:
    assert [backend.name for backend in BACKENDS] == list(DECODE_TABLE)


@pytest.mark.parametrize("arch", ANY)
def test_dispatch_chooses_the_first_that_must_decode(arch: str) -> None:
    if not all(possible(name, arch) for name in ("tilelang", "triton")):
        pytest.skip("tilelang or triton is not installed")
    for call in calls(arch):
        expected = default_decode_backend(call)
        if expected is None:
            with pytest.raises(NotImplementedError, match="no backend runs this call"):
                select_decode(call)
        else:
            assert select_decode(call).name == expected, call


def test_a_named_backend_that_refuses_says_why() -> None:
    q, cache = torch.zeros(1, 1, 2, 16), torch.zeros(1, 4, 2, 16)
    lengths = torch.tensor([3], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="backend='mma' does not run this call"):
        tileattn.decode(q, cache, cache, lengths, backend="mma")
    with pytest.raises(NotImplementedError, match="backend='tilelang' does not run this call"):
        tileattn.decode(q, cache, cache, lengths, backend="tilelang", splits=FixedSplit(128))
    with pytest.raises(ValueError, match="backend must be one of"):
        tileattn.decode(q, cache, cache, lengths, backend="cuda")
