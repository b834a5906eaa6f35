"""A conformance case as a call of the public function; for the tests of both passes and benchmarks/precompile.py."""

from __future__ import annotations

from torch import Tensor

import tileattn
from tileattn import Causal, ops
from tileattn.dispatch import BACKENDS
from tileattn.testing import Arguments
from tileattn.variant import encode


def refusal(arguments: Arguments, name: str, needs_grad: bool) -> str | None:
    """Why the backend of this name does not run a case, or None."""
    q, k, v, mask, score_mods, sink, *_ = arguments.positional
    call = ops.make_call(q, k, v, sink, encode(mask, score_mods)[0], needs_grad=needs_grad)
    return next(backend for backend in BACKENDS if backend.name == name).refusal(call)


def run(arguments: Arguments, backend: str) -> tuple[Tensor, Tensor]:
    """o, as bshd, and lse from the public function."""
    bhsd = arguments.layout == "bhsd"
    q, k, v = (x.transpose(1, 2) if bhsd else x for x in (arguments.q, arguments.k, arguments.v))
    causal = type(arguments.mask) is Causal
    o, lse = tileattn.attention(
        q,
        k,
        v,
        # As users write it; plain and causal calls may take a shorter way inside.
        mask=None if causal else arguments.mask,
        causal=causal,
        score_mod=arguments.score_mods or None,
        scale=arguments.scale,
        sink=arguments.sink,
        layout=arguments.layout,
        return_lse=True,
        backend=backend,
        **arguments.named_descales,
    )
    return (o.transpose(1, 2) if bhsd else o), lse
