"""A conformance case as a call of the public function; for the tests of both passes and benchmarks/precompile.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import tileattn
from tests.tools.support_table import check_refusal, possible
from tileattn import Causal, Mask
from tileattn.call.dropout import Dropout
from tileattn.call.inputs import Inputs
from tileattn.runtime import operators as ops
from tileattn.runtime.dispatch import BACKENDS
from tileattn.runtime.run import first_positions
from tileattn.testing import Arguments
from tileattn.testing.call_arguments import DROPOUT_SEED
from tileattn.variant.key import encode
from tileattn.variant.scores import for_packed
from tileattn.variant.sparse.blocks import for_call, for_tensors


def refusal(arguments: Arguments, name: str, needs_grad: bool) -> str | None:
    """Why the backend of this name does not run a case, or None.

    Raises:
        AssertionError: the table of what must run says otherwise (support_table.py), so that a backend which begins to
            refuse too much fails here, and is not skipped.
    """
    q, k, v, mask, score_mods, sink, *_ = arguments.positional
    if arguments.packed is not None:
        score_mods = for_packed(score_mods, *arguments.packed[:2])
    mask = in_call(arguments)
    dropout = Dropout(arguments.dropout_p, torch.zeros(1, dtype=torch.int64)) if arguments.dropout_p else None
    inputs = Inputs(q, k, v, sink, dropout=dropout, packed=arguments.packed)
    call = ops.make_call(inputs, encode(mask, score_mods)[0], needs_grad=needs_grad)
    reason = next(backend for backend in BACKENDS if backend.name == name).refusal(call)
    if possible(name, call.arch):
        check_refusal(name, call, reason)
    return reason


def in_call(arguments: Arguments) -> Mask | None:
    """The mask with the operands that it has in the call."""
    q, k, packed = arguments.q, arguments.k, arguments.packed
    if packed is None:
        return for_tensors(arguments.mask, q, k)
    sizes = (packed.cu_seqlens_q.shape[0] - 1, q.shape[2], k.shape[2], packed.max_seqlen_q, packed.max_seqlen_k)
    return for_call(arguments.mask, lambda: sizes, lambda: first_positions(q, k, packed))


def run(arguments: Arguments, backend: str) -> tuple[Tensor, Tensor]:
    """o, as bshd, and lse from the public function."""
    causal = type(arguments.mask) is Causal
    options = {
        # As users write it; plain and causal calls may take a shorter way inside.
        "mask": None if causal else arguments.mask,
        "causal": causal,
        "score_mod": arguments.score_mods or None,
        "scale": arguments.scale,
        "sink": arguments.sink,
        "return_lse": True,
        "backend": backend,
    }
    if arguments.packed is not None:
        return _run_packed(arguments, options)
    bhsd = arguments.layout == "bhsd"
    q, k, v = (x.transpose(1, 2) if bhsd else x for x in (arguments.q, arguments.k, arguments.v))
    o, lse = tileattn.attention(q, k, v, layout=arguments.layout, **options, **arguments.named_descales)
    return (o.transpose(1, 2) if bhsd else o), lse


def _run_packed(arguments: Arguments, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The same of packed sequences, with one batch element, as the case has them."""
    torch.manual_seed(DROPOUT_SEED)
    q, k, v = (x[0] for x in (arguments.q, arguments.k, arguments.v))
    dropout_p = arguments.dropout_p
    o, lse = tileattn.varlen_attention(q, k, v, *arguments.packed, dropout_p=dropout_p, **options)
    return o[None], lse[None]
