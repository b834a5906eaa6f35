"""Dropout on the shards of two GPUs: one GPU's pattern, in both passes, by the rule of tolerance."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parallel.test_dropout import WAYS
from tests.parallel.two_gpus.ranks_dropout import dropped
from tests.tools.ranks.two_gpus import MARKS, on_both
from tileattn.testing import assert_accurate

pytestmark = MARKS


@pytest.mark.parametrize(("mask", "layout"), [("causal", "zigzag"), ("documents", "contiguous")])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way["algorithm"])
def test_both_passes_drop_what_one_gpu_drops(way: dict[str, Any], mask: str, layout: str) -> None:
    for result in on_both(dropped, way, layout, mask):
        for name, (got, oracle, eager) in result.items():
            lse_of = torch.bfloat16 if name == "lse" else None
            assert_accurate(name, got, oracle, [eager], gradient=name not in ("o", "lse"), lse_of=lse_of)
