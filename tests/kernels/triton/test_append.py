"""append_kv's Triton kernel, in Triton's interpreter or on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.tools.append_cases import CASES, AppendCase, Built, check
from tileattn.api.append import append_kv
from tileattn.call import cache_status

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def fresh_status(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cache_status.STATUS, "devices", {})
    yield
    cache_status.check_caches()


@pytest.mark.slow_except(
    "halves-pages",
    "interleaved",
    "odd-partial",
    "unaligned",
    "positions",
    "q-positions",
    reason="0.3 to 1 s each in Triton's interpreter",
)
@pytest.mark.parametrize(
    "case",
    # An interpreter takes seconds for the larger ones.
    [pytest.param(case, id=case.id, marks=[pytest.mark.slow] * case.id.startswith("packed")) for case in CASES],
)
def test_case(case: AppendCase) -> None:
    built = Built(case, DEVICE)
    places, options = built.arguments
    check(built, append_kv(*places, **options, backend="triton"))


WRONG = {
    "seqlens_k": (lambda built: built.seqlens_k.fill_(1000), "seqlens_k must be from 0"),
    "negative": (lambda built: built.seqlens_k.fill_(-(2**31)), "seqlens_k must be from 0"),
    "page_table": (lambda built: built.table.fill_(built.k_cache.shape[0]), "page_table's entries"),
    "negative page": (lambda built: built.table.fill_(-5), "page_table's entries"),
    "cu_seqlens_q": (lambda built: built.cu_seqlens_q.add_(1), "cu_seqlens_q must start"),
    "huge cu_seqlens_q": (lambda built: built.cu_seqlens_q.mul_(10**7), "cu_seqlens_q must start"),
    "positions": (lambda built: built.positions.fill_(10**6), "cos and sin must have a row"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_reported(name: str) -> None:
    """Nothing outside of the caches is written: the interpreter's process would not survive all of these."""
    case = next(case for case in CASES if case.id == "packed-positions")
    built = Built(case, DEVICE)
    change, says = WRONG[name]
    change(built)
    with pytest.raises(ValueError, match=says):
        append_and_wait(built)


def append_and_wait(built: Built) -> None:
    places, options = built.arguments
    append_kv(*places, **options, backend="triton")
    cache_status.check_caches()
