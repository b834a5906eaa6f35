"""Attention over the ranks of a torch.distributed process group: :class:`Plan`, and :func:`simulate`.

>>> plan = tileattn.parallel.Plan(group, seqlen)
>>> x, positions = plan.shard(x, positions)
>>> o = plan.attention(q, k, v, causal=True)  # q, k and v are shards, and so is o
"""

from __future__ import annotations

from .consent.agreement import RankError
from .plan import Plan, Traffic
from .prediction.simulate import Simulation, simulate
from .prediction.topology import Topology

__all__ = ["Plan", "RankError", "Simulation", "Topology", "Traffic", "simulate"]
