"""append_kv: what it writes and leaves alone, by PyTorch and by Triton's interpreter; torch.compile; bad input."""

from __future__ import annotations

import pytest

from tests.tools.append_cases import CASES, FLOAT64, AppendCase, Built, check
from tileattn.api.append import append_kv


@pytest.mark.parametrize("case", [*CASES, FLOAT64], ids=lambda case: case.id)
def test_case(case: AppendCase) -> None:
    built = Built(case)
    places, options = built.arguments
    check(built, append_kv(*places, **options))
