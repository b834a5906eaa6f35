"""Attention over the ranks of a torch.distributed process group: `Plan`."""

from __future__ import annotations

from .agreement import RankError
from .plan import Plan, Traffic

__all__ = ["Plan", "RankError", "Traffic"]
