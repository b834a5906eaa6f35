"""The sink's gradient, the same by every backend, also where a gradient of o or lse is NaN."""

from __future__ import annotations

import math

import pytest
import torch

from tileattn.kernels.sink import sink_gradient
from tileattn.kernels.torch import backward as torch_backend
from tileattn.reference import backward as reference


@pytest.mark.parametrize("wrong", [0.0, math.inf, math.nan])
@pytest.mark.parametrize("logit", [-math.inf, 0.5, math.nan])
def test_it_is_that_of_the_torch_backend_and_the_reference(logit: float, wrong: float) -> None:
    """In the last head alone; its first row sees no key."""
    sink = torch.tensor([-math.inf, 0.25, logit])
    lse, delta = torch.rand(2, 3, 5), torch.rand(2, 3, 5)
    lse[:, :, 0] = sink
    delta[1, 2, 0] = wrong
    got = sink_gradient(sink, lse, delta)
    for module in (torch_backend, reference):
        torch.testing.assert_close(got, module._sink_gradient(sink, lse, delta), rtol=0, atol=0, equal_nan=True)
    assert got[0] == 0
    assert got[1].isfinite()
