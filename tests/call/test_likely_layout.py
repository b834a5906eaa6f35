"""The warning for tensors that are likely (batch, heads, seqlen, head_dim): which shapes it is for, and which never."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tileattn
from tileattn.call import likely_layout
from tileattn.runtime import prepared

Shape = tuple[int, int, int, int]  # as the call reads it: batch, seqlen, heads, head_dim

# (q, k) of calls that are right. v has k's shape.
RIGHT: dict[str, tuple[Shape, Shape]] = {
    "training": ((1, 256, 8, 16), (1, 256, 8, 16)),
    "as many tokens as heads": ((1, 32, 32, 8), (1, 32, 32, 8)),
    "a prompt of fewer tokens than heads": ((2, 20, 32, 8), (2, 20, 8, 8)),
    "a prompt, 128 heads": ((1, 17, 128, 8), (1, 17, 128, 8)),
    "a prompt, 128 heads on one": ((1, 17, 128, 8), (1, 17, 1, 8)),
    "windows of 49 pixels": ((64, 49, 6, 8), (64, 49, 6, 8)),
    "one query": ((1, 1, 64, 8), (1, 600, 8, 8)),
    "one query of one key": ((1, 1, 64, 8), (1, 1, 64, 8)),
    "drafts": ((2, 16, 128, 8), (2, 700, 8, 8)),
    "16 queries of many heads": ((1, 16, 512, 8), (1, 16, 512, 8)),
    "queries at the end of longer keys": ((1, 40, 64, 8), (1, 300, 64, 8)),
    "no keys": ((1, 40, 256, 8), (1, 0, 256, 8)),
    "more tokens than any model has heads": ((1, 129, 256, 8), (1, 129, 256, 8)),
    "256 heads on 8": ((1, 64, 256, 8), (1, 64, 8, 8)),
    "many heads, keys of another length": ((1, 64, 256, 8), (1, 100, 256, 8)),
}
# (q, k) in bhsd, given to calls that read bshd.
WRONG: dict[str, tuple[Shape, Shape]] = {
    "32 heads of 300": ((1, 32, 300, 8), (1, 32, 300, 8)),
    "grouped heads": ((1, 32, 300, 8), (1, 8, 300, 8)),
    "128 heads of 129": ((1, 128, 129, 8), (1, 128, 129, 8)),
}


@pytest.fixture(autouse=True)
def _a_new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has not warned and has prepared nothing."""
    monkeypatch.setitem(likely_layout._state, "warned", False)
    monkeypatch.setattr(prepared, "FORWARDS", {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def tensors(case: tuple[Shape, Shape]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k = case
    return torch.zeros(q), torch.zeros(k), torch.zeros(k)


@pytest.mark.parametrize("case", RIGHT.values(), ids=RIGHT)
def test_right_calls_do_not_warn(case: tuple[Shape, Shape]) -> None:
    tileattn.attention(*tensors(case), causal=True)
    tileattn.attention(*tensors(case), mask=tileattn.SlidingWindow(5, 0))


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("mask", [None, tileattn.SlidingWindow(5, 0)], ids=["plain", "masked"])
def test_wrong_calls_warn_once_where_they_are(case: tuple[Shape, Shape], mask: tileattn.Mask | None) -> None:
    q, k, v = tensors(case)
    with pytest.warns(UserWarning, match=r'read as \(batch, seqlen, heads, head_dim\).*pass layout="bhsd"') as caught:
        o = tileattn.attention(q, k, v, mask=mask)
    assert caught[0].filename == __file__
    assert o.shape == q.shape
    tileattn.attention(q[:, :, :200], k[:, :, :200], v[:, :, :200])  # another shape: prepared anew, and silent


def test_a_named_layout_and_pytorchs_signature_do_not_warn() -> None:
    q, k, v = tensors(WRONG["32 heads of 300"])
    tileattn.attention(q, k, v, layout="bhsd")
    tileattn.scaled_dot_product_attention(q, k, v)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    tileattn.attention(q, k, v)


def test_calls_without_values_do_not_warn() -> None:
    q, k, v = (x.to("meta") for x in tensors(WRONG["grouped heads"]))
    assert tileattn.attention(q, k, v).shape == q.shape


@pytest.mark.slow  # Dynamo takes seconds
def test_a_traced_graph_does_not_warn() -> None:
    compiled = torch.compile(lambda q, k, v: tileattn.attention(q, k, v), backend="eager", fullgraph=True)
    for case in WRONG.values():
        assert compiled(*tensors(case)).shape == case[0]
        with FakeTensorMode():
            assert tileattn.attention(*tensors(case)).shape == case[0]


def test_a_call_that_is_prepared_does_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain calls are checked once for each shape, so that the warning costs the later ones nothing."""
    arguments = tensors(WRONG["grouped heads"])
    with pytest.warns(UserWarning, match="layout"):
        tileattn.attention(*arguments)
    monkeypatch.delattr("tileattn.call.validation.warn_of_bhsd")  # to ask again would be a NameError
    tileattn.attention(*arguments)
