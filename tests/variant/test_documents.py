"""Documents with ids of every integer dtype: two positions see each other exactly where their ids are equal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tileattn
from tileattn import Causal, Documents, Mask
from tileattn.reference import flash_attention_1, flash_attention_2, standard_attention
from tileattn.testing import assert_forward_accurate, eager_attention, oracle_attention

SEQLEN, HEADS, HEAD_DIM = 67, 2, 16
FAR = 2**32  # equal to 0 in 32 bits
IDS = {
    "int64-far": torch.tensor([0, FAR, 2 * FAR, 0, -FAR, 1, FAR + 1, -1, FAR - 1]),
    "int64-extreme": torch.tensor([-(2**63), 2**63 - 1, 0, -1, 2**31, -(2**31), 2**31 - 1]),
    "int32": torch.tensor([0, -(2**31), 2**31 - 1, -1], dtype=torch.int32),
    "int16": torch.tensor([-(2**15), 0, 2**15 - 1, -1], dtype=torch.int16),
    "int8": torch.tensor([-128, 127, 0, -1], dtype=torch.int8),
    "uint8": torch.tensor([255, 127, 128, 0], dtype=torch.uint8),
}
REFERENCE = {f.__name__: f for f in (standard_attention, flash_attention_1, flash_attention_2)}


def _backends() -> list[object]:
    backends: list[object] = [(name, "cpu") for name in (*REFERENCE, "torch")]
    if not torch.cuda.is_available():
        return [*backends, ("triton", "cpu")]
    return backends + [pytest.param((name, "cuda"), marks=pytest.mark.gpu) for name in ("tilelang", "triton", "torch")]


def _ids(kinds: Tensor, adjacent: bool) -> Tensor:
    """(2, SEQLEN), whose second row is the first in another order."""
    ids = kinds.repeat(-(-SEQLEN // len(kinds)))[:SEQLEN]
    ids = ids.sort().values if adjacent else ids
    return torch.stack([ids, ids.flip(0)])


class _Equal(Mask):
    """The specification, on the ids as they were given. For tensors only."""

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.ids[b, q] == self.ids[b, k]


@pytest.mark.slow_cases(
    "triton-cpu-int64-far-sorted",
    "triton-cpu-int64-extreme-mixed",
    "triton-cpu-int32-sorted",
    "triton-cpu-int16-mixed",
    "triton-cpu-int8-sorted",
    "triton-cpu-uint8-mixed",
    "triton-cpu-int64-extreme-sorted",
    "triton-cpu-int32-mixed",
    "triton-cpu-int8-mixed",
    reason="0.6 s each in Triton's interpreter",
)
@pytest.mark.parametrize("adjacent", [True, False], ids=["sorted", "mixed"])
@pytest.mark.parametrize("kinds", IDS.values(), ids=IDS.keys())
@pytest.mark.parametrize("on", _backends(), ids="-".join)
def test_ids_of_any_dtype(on: tuple[str, str], kinds: Tensor, adjacent: bool) -> None:
    backend, device = on
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, SEQLEN, HEADS, HEAD_DIM, generator=generator).to(device, torch.float16) for _ in range(3))
    ids = _ids(kinds, adjacent).to(device)
    expected: tuple[Tensor, Tensor, Tensor, Mask] = (q, k, v, _Equal(ids))
    attend: Callable[..., tuple[Tensor, Tensor]] = REFERENCE.get(backend) or (
        lambda q, k, v, mask: tileattn.attention(q, k, v, mask=mask, return_lse=True, backend=backend)
    )
    got = attend(q, k, v, Documents(ids))
    assert_forward_accurate(backend, got, oracle_attention(*expected), eager_attention(*expected))


@pytest.mark.parametrize("on", _backends()[len(REFERENCE) :], ids="-".join)
def test_gradients_stay_within_a_document(on: tuple[str, str]) -> None:
    """The gradients of one row's output are 0 for keys outside its document."""
    backend, device = on
    ids = _ids(IDS["int64-far"], adjacent=False).to(device)
    k = torch.ones(2, SEQLEN, HEADS, HEAD_DIM, dtype=torch.float16, device=device, requires_grad=True)
    v = torch.ones_like(k, requires_grad=True)
    q = torch.ones_like(k)
    o = tileattn.attention(q, k, v, mask=Causal() & Documents(ids), backend=backend)
    o[:, -1].sum().backward()
    assert v.grad is not None
    seen = v.grad.float().abs().sum((2, 3)) > 0
    assert torch.equal(seen, ids == ids[:, -1:])


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_numbers_take_the_place_of_int64_ids_only(dtype: torch.dtype) -> None:
    """Kernels compare 32 bits in any case."""
    ids = torch.tensor([[5, 5, 3, 5, 3]], dtype=dtype)
    mask = Documents(ids)
    assert mask.ids.dtype == torch.int32
    assert mask.ids.tolist() == ([[0, 0, 2, 0, 2]] if dtype == torch.int64 else ids.tolist())
