"""Sizes of 0, with every mask and modification that holds a tensor: results, gradients, no access beyond a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tileattn
from tileattn import ALiBi, Bias, Causal, Documents, KeyPadding, PrefixLM
from tileattn.kernels.tilelang.host import as_bytes
from tileattn.testing import poisoned_memory
from tileattn.variant.tile_loads import is_aligned

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
SIZES = {"batch": (0, 5, 7), "queries": (2, 0, 7), "keys": (2, 5, 0), "all": (0, 0, 0)}
PACKED = {  # lengths_q, lengths_k, unused rows at the end
    "no sequences": ((), (), 0),
    "unused rows": ((), (), 3),
    "all empty": ((0, 0), (0, 0), 0),
    "without keys": ((3, 2), (0, 0), 0),
    "without keys, unused rows": ((3, 0), (0, 0), 2),
    "without queries": ((0, 0), (3, 4), 0),
}


def _backends(*names: str) -> list[object]:
    """(backend, device)."""
    backends: list[object] = [("torch", "cpu")]
    if not torch.cuda.is_available():
        return backends + [("triton", "cpu")] * ("triton" in names)
    return backends + [pytest.param((name, "cuda"), marks=pytest.mark.gpu) for name in names]


Variant = Callable[[int, int, int, str], dict[str, Any]]


def _ids(batch: int, seqlen_k: int, device: str, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(batch, seqlen_k, dtype=dtype, device=device)


def _random(*shape: int, device: str) -> Tensor:
    return torch.ones(shape, dtype=torch.float32, device=device, requires_grad=True)


def _captured(batch: int, seqlen_q: int, seqlen_k: int, device: str) -> dict[str, Any]:
    table, seen = _random(seqlen_k, device=device), torch.ones(batch, seqlen_k, dtype=torch.bool, device=device)
    return {"score_mod": lambda score, b, h, q, k: score + table[k], "mask": lambda b, h, q, k: seen[b, k]}


VARIANTS: dict[str, Variant] = {
    "causal": lambda batch, n, keys, at: {"causal": True},
    "documents": lambda batch, n, keys, at: {"mask": Documents(_ids(batch, keys, at)) & Causal()},
    "documents-int32": lambda batch, n, keys, at: {"mask": Documents(_ids(1, keys, at, torch.int32))},
    "documents-or": lambda batch, n, keys, at: {"mask": Documents(_ids(1, keys, at)) | Causal()},
    "padding": lambda batch, n, keys, at: {"key_padding_mask": _ids(batch, keys, at, torch.bool)},
    "padding-one": lambda batch, n, keys, at: {"mask": KeyPadding(_ids(1, keys, at, torch.bool)) & Causal()},
    "prefix": lambda batch, n, keys, at: {"mask": PrefixLM(torch.zeros(batch, dtype=torch.int64, device=at))},
    "bias": lambda batch, n, keys, at: {"score_mod": Bias(_random(batch, HEADS, n, keys, device=at))},
    "bias-one": lambda batch, n, keys, at: {"score_mod": Bias(_random(1, 1, 1, keys, device=at)), "causal": True},
    "alibi": lambda batch, n, keys, at: {"score_mod": ALiBi(_random(batch, HEADS, device=at))},
    "captured": _captured,
}
OF_SEQUENCES = ("causal", "prefix", "bias", "bias-one", "alibi")


def _check(outputs: tuple[Tensor, Tensor], leaves: dict[str, Tensor], expected_lse: Tensor) -> None:
    o, lse = outputs
    assert (o == 0).all()
    torch.testing.assert_close(lse, expected_lse.expand_as(lse), rtol=0, atol=0)
    o.sum().backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        assert leaf.grad.shape == leaf.shape
        assert (leaf.grad == 0).all(), name


def _leaves(variant: dict[str, Any], *tensors: Tensor | None) -> dict[str, Tensor]:
    leaves = {f"tensor {i}": tensor for i, tensor in enumerate(tensors) if tensor is not None}
    mod = variant.get("score_mod")
    own = getattr(mod, "tensor", getattr(mod, "slopes", None))
    return leaves if own is None else {**leaves, "of the modification": own}


def _qkv(*shapes: tuple[int, ...], device: str) -> list[Tensor]:
    return [torch.ones(shape, dtype=torch.float16, device=device, requires_grad=True) for shape in shapes]


@pytest.mark.slow_cases(
    "triton-cpu-causal-queries-",
    "triton-cpu-causal-keys-",
    "triton-cpu-documents-keys-",
    "triton-cpu-documents-int32-keys-",
    "triton-cpu-documents-or-keys-*",
    "triton-cpu-padding-keys-",
    "triton-cpu-padding-one-keys-*",
    "triton-cpu-prefix-keys-sink",
    "triton-cpu-bias-keys-",
    "triton-cpu-bias-one-keys-sink",
    "triton-cpu-alibi-keys-sink",
    "triton-cpu-captured-keys-",
    "triton-cpu-documents-int32-keys-sink",
    "triton-cpu-padding-keys-sink",
    "triton-cpu-bias-one-keys-",
    "triton-cpu-alibi-keys-",
    reason="0.5 s each in Triton's interpreter",
)
@pytest.mark.parametrize("with_sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("on", _backends("tilelang", "triton", "torch"), ids="-".join)
def test_dense(on: tuple[str, str], variant: Variant, sizes: tuple[int, int, int], with_sink: bool) -> None:
    (backend, device), (batch, seqlen_q, seqlen_k) = on, sizes
    shapes = [(batch, n, heads, HEAD_DIM) for n, heads in ((seqlen_q, HEADS), (seqlen_k, KV_HEADS))]
    q, k, v = _qkv(*shapes, shapes[1], device=device)
    options = variant(batch, seqlen_q, seqlen_k, device)
    sink = torch.full((HEADS,), 0.5, device=device, requires_grad=True) if with_sink else None
    with poisoned_memory():
        outputs = tileattn.attention(q, k, v, sink=sink, return_lse=True, backend=backend, **options)
        _check(outputs, _leaves(options, q, k, v, sink), torch.tensor(0.5 if with_sink else -torch.inf, device=device))


@pytest.mark.parametrize("lengths", PACKED.values(), ids=PACKED.keys())
@pytest.mark.parametrize("variant", OF_SEQUENCES)
@pytest.mark.parametrize("on", _backends("tilelang", "torch"), ids="-".join)
def test_packed(on: tuple[str, str], variant: str, lengths: tuple[tuple[int, ...], tuple[int, ...], int]) -> None:
    (backend, device), (lengths_q, lengths_k, behind) = on, lengths
    totals = [sum(each) + behind for each in (lengths_q, lengths_k)]
    q, k, v = _qkv(
        *((n, h, HEAD_DIM) for n, h in zip((*totals, totals[1]), (HEADS, KV_HEADS, KV_HEADS))), device=device
    )
    ends = [[0, *torch.tensor(each, dtype=torch.int32).cumsum(0).tolist()] for each in (lengths_q, lengths_k)]
    cu_seqlens = [torch.tensor(each, dtype=torch.int32, device=device) for each in ends]
    longest = [max(each, default=0) for each in (lengths_q, lengths_k)]
    options = VARIANTS[variant](len(lengths_q), *longest, device)
    with poisoned_memory():
        outputs = tileattn.varlen_attention(q, k, v, *cu_seqlens, *longest, return_lse=True, backend=backend, **options)
        _check(outputs, _leaves(options, q, k, v), torch.tensor(-torch.inf, device=device))


def test_tilelang_kernels_are_given_no_empty_tensor() -> None:
    """What stands in for one can be read, by TMA as well."""
    for dtype in (torch.bool, torch.int32, torch.bfloat16):
        given = as_bytes(torch.zeros(2, 3, 0, dtype=dtype))
        assert given.shape == (2, 3, 1)
        assert (given == 0).all()
        assert dtype != torch.bfloat16 or is_aligned(given)
