"""What `tileattn memory` says of workspaces that depend on sizes: the parts of dk and dv of groups that are split."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tileattn.bench import warmup
from tileattn.bench.cases import Case
from tileattn.kernels.tilelang.backward.launch import configured
from tileattn.kernels.tilelang.backward.shares.choice import workspace_bytes
from tileattn.kernels.tilelang.backward.shares.last_wave import later_keys
from tileattn.measure.units import human_bytes


def parts_of_gradients(case: Case, arch: str) -> tuple[int, int, int]:
    """How the backward pass of a dense case splits its groups of heads: shares, keys with shares, bytes of parts."""
    (call,) = warmup.backward_calls([(case.head_dim, case.head_dim_v)], [case.variant], [case.dtype], arch)
    q_shape = torch.Size((case.batch, case.seqlen_q, case.heads, case.head_dim))
    k_shape = torch.Size((case.batch, case.seqlen_k, case.kv_heads, case.head_dim))
    shares, whole_keys = configured(call, q_shape, k_shape)[1]
    later = later_keys(k_shape, whole_keys)
    return shares, later[1], workspace_bytes(call, later, shares)


def lines(cases: Iterable[Case], arch: str) -> list[str]:
    """A line for each of these cases whose memory holds parts of dk and dv."""
    found = ((case, *parts_of_gradients(case, arch)) for case in cases)
    return [
        f"{case.name}: {human_bytes(size)} of tileattn's memory are parts of dk and dv, of {shares} shares of heads"
        + (f" for the last {keys} keys" if keys < case.seqlen_k else "")
        for case, shares, keys, size in found
        if size
    ]
