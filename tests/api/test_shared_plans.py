"""Plans that the layers of a step share."""

from __future__ import annotations

from unittest import mock

import torch

from tileattn.api import shared_plans
from tileattn.api.shared_plans import SharedPlans


def test_a_plan_belongs_to_a_stream_and_to_no_graph() -> None:
    """Another stream would not wait for the plan, and a replay would not make one from outside of its graph again."""
    x = mock.Mock(is_cuda=True, shape=(1, 1, 8, 64), dtype=torch.float16)
    x.data_ptr.return_value, x.stride.return_value = 0, (512, 512, 64, 1)
    plans = SharedPlans()
    made = mock.Mock(side_effect=lambda *_, **__: object())
    got = []
    for stream, capturing in ((1, False), (1, False), (2, False), (2, True), (2, True), (1, False)):
        with (
            mock.patch.object(shared_plans, "decode_plan", made),
            mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=capturing),
            mock.patch.object(torch._C, "_cuda_getCurrentRawStream", return_value=stream, create=True),
        ):
            got.append(plans.plan("kind", x, x, x, torch.zeros(1), {}))
    assert made.call_count == 3
    assert got[0] is got[1] is got[5]
    assert got[3] is got[4]
