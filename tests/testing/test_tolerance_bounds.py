"""The numbers of the tolerance rule: twice eager's error, a rounding of the output, an eighth of one for lse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tileattn.testing import assert_accurate

KINDS: dict[str, dict[str, Any]] = {"o": {}, "gradient": {"gradient": True}, "lse": {"lse_of": torch.float32}}


def expect(passes: bool, *arguments: Any, **options: Any) -> None:
    if passes:
        assert_accurate("x", *arguments, **options)
    else:
        with pytest.raises(AssertionError, match=r"x: error .* allowed"):
            assert_accurate("x", *arguments, **options)


@pytest.mark.parametrize(("times", "passes"), [(1.9, True), (2.1, False), (3.9, False)])
@pytest.mark.parametrize("kind", KINDS)
def test_twice_eagers_error_and_no_more(kind: str, times: float, passes: bool) -> None:
    """Eager errs by 1 in 64, many thousands of roundings, in all rows: so do the worst row and the whole."""
    oracle = torch.full((7, 8), 4.0, dtype=torch.float64)
    eager, got = oracle * (1 + 1 / 64), (oracle * (1 + times / 64)).float()
    expect(passes, got, oracle, [eager], **KINDS[kind])


@pytest.mark.parametrize(("times", "passes"), [(1.9, True), (2.1, False)])
def test_the_worst_run_of_eager_counts(times: float, passes: bool) -> None:
    oracle = torch.full((7, 8), 4.0, dtype=torch.float64)
    runs = [oracle * (1 + error / 64) for error in (0, 1, -0.5)]
    expect(passes, (oracle * (1 + times / 64)).float(), oracle, runs)


@pytest.mark.parametrize(("roundings", "passes"), [(0.9, True), (1.1, False)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_rounding_of_the_output_and_no_more(dtype: torch.dtype, roundings: float, passes: bool) -> None:
    """Eager makes no error. The oracle is moved and not `got`, which is exact in any dtype."""
    got = torch.ones(7, 8, dtype=dtype)
    oracle = got.double() / (1 + roundings * torch.finfo(dtype).eps)
    expect(passes, got, oracle, [oracle])


@pytest.mark.parametrize(("roundings", "passes"), [(0.9, True), (1.1, False)])
def test_a_rounding_of_the_call_for_a_wider_gradient(roundings: float, passes: bool) -> None:
    oracle = torch.ones(7, 8, dtype=torch.float64)
    got = (oracle * (1 + roundings * torch.finfo(torch.bfloat16).eps)).float()
    expect(passes, got, oracle, [oracle], gradient=True, call_dtype=torch.bfloat16)


@pytest.mark.parametrize(("share", "passes"), [(0.9, True), (1.1, False)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_eighth_of_a_rounding_of_the_inputs_for_lse(dtype: torch.dtype, share: float, passes: bool) -> None:
    """Beside a rounding of lse itself, which is next to nothing in float32."""
    oracle = torch.zeros(7, dtype=torch.float64)
    got = (oracle + share * torch.finfo(dtype).eps / 8).float()
    expect(passes, got, oracle, [oracle], lse_of=dtype)
