"""A conformance case of decode as a call of the public function; for the tests and benchmarks/precompile.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tileattn
from tests.tools.support_table import check_decode_refusal, possible
from tileattn.call.decoding import DecodeCall, DecodeInputs
from tileattn.runtime.decoding import DecodeOptions, make_decode_call, with_variant
from tileattn.runtime.dispatch import BACKENDS
from tileattn.testing import DecodeArguments

# On a GPU torch comes last, as it is the slowest.
NAMES = [backend.name for backend in BACKENDS if backend.decode is not None]
# (backend, device) on which tests of any decode call run; kernels in Triton's interpreter are slow.
EVERYWHERE = [
    pytest.param("torch", "cpu", id="torch"),
    pytest.param("triton", "cpu", id="triton", marks=pytest.mark.slow),
    *(pytest.param(name, "cuda", id=f"{name}-cuda", marks=pytest.mark.gpu) for name in NAMES),
]


def run_decode(arguments: DecodeArguments, backend: str | None, **changes: Any) -> tuple[Tensor, Tensor]:
    """o and lse from the public function."""
    o, lse = tileattn.decode(*arguments.positional, **(arguments.options | changes), return_lse=True, backend=backend)
    return o, lse


def facts_of(arguments: DecodeArguments) -> DecodeCall:
    """The static facts of the call."""
    q, packed = arguments.q, arguments.cu_seqlens_q is not None
    inputs = DecodeInputs(
        q[None] if packed else q,
        *arguments.positional[1:],
        page_table=arguments.page_table,
        cu_seqlens_q=arguments.cu_seqlens_q,
        sink=arguments.sink,
    )
    longest = arguments.max_seqlen_q if arguments.max_seqlen_q is not None else q.shape[1]
    variant, inputs = with_variant(
        inputs, longest, arguments.mask, arguments.score_mods or None, arguments.causal, arguments.tree_mask
    )
    return make_decode_call(inputs, DecodeOptions(variant, 1.0, longest, arguments.splits, True, None))


def decode_refusal(arguments: DecodeArguments, name: str) -> str | None:
    """Why the backend of this name does not run a case, or None.

    Raises:
        AssertionError: the table of what must run says otherwise (support_table.py).
    """
    call = facts_of(arguments)
    phase = next(backend for backend in BACKENDS if backend.name == name).decode
    reason = "it does not decode" if phase is None else phase.refusal(call)
    if possible(name, call.arch):
        check_decode_refusal(name, call, reason)
    return reason


def skip_if_refused(arguments: DecodeArguments, name: str) -> None:
    """Skips a test whose call a backend refuses, after its refusal has been checked against the table."""
    if reason := decode_refusal(arguments, name):
        pytest.skip(f"refused, as it says: {reason}")


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """A tensor of NaN, to write results to."""
    return torch.full(shape, torch.nan, dtype=dtype, device=device)
