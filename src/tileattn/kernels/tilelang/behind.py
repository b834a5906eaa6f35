"""The kernels that a call will ask for behind its forward kernel: its lists of tiles, then its backward pass.

They follow from the choices that the launches make. Where a choice depends on what only the later pass knows, the usual
is taken; a kernel that was compiled in vain costs time of the background process.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...call.expected import backward_of
from ...call.facts import AttentionCall, BackwardCall
from ...tuner import state
from ...variant.program import program
from ..scale import scaled_first
from .backward.config import BackwardConfig
from .backward.defaults import default
from .backward.jobs import jobs_of
from .backward.launch import configured
from .backward.library import AnyBackwardJob, kernel_jobs, longest_first
from .backward.listed import as_listed
from .build.job import KernelJob
from .lists.bits import bits_jobs
from .lists.launch import lists_jobs


def expected(call: AttentionCall, scale: float) -> BackwardCall | None:
    """The backward pass that a call will probably have, which its kernels are compiled for; None if it has none.

    Asked for while the forward pass is prepared, as :func:`tileattn.call.expected.expecting` says.
    """
    if not call.needs_grad or state.session is not None:  # the tuner chooses other kernels, and measures
        return None
    return backward_of(scaled_first(call, scale), len(program(call.variant).tensors))


def behind_forward(
    call: AttentionCall,
    backward: BackwardCall | None,
    listed: bool,
    bits: bool,
    q_shape: torch.Size,
    k_shape: torch.Size,
) -> Iterator[KernelJob]:
    """The kernels behind a call's forward kernel.

    Args:
        call: what the forward kernel is compiled for.
        backward: what :func:`expected` returned.
        listed: whether the forward kernel takes its tiles from lists.
        bits: whether mixed tiles have bits.
    """
    if listed:
        yield from lists_jobs(call.variant, call.arch, call.packed)
    if bits:
        yield from bits_jobs(call.variant, call.arch)
    if backward is not None:
        yield from _of_backward(backward, listed, q_shape, k_shape)


def _of_backward(
    call: BackwardCall, listed: bool, q_shape: torch.Size, k_shape: torch.Size
) -> tuple[AnyBackwardJob, ...]:
    config = default(call)
    if call.forward.packed:  # the sizes of each call decide about lists; those of this one did in the forward pass
        if listed and not isinstance(config, BackwardConfig):
            return longest_first(kernel_jobs(call, as_listed(config)))
        return longest_first(kernel_jobs(call))
    chosen, of_groups = configured(call, q_shape, k_shape)
    return longest_first(jobs_of(call, chosen or config, of_groups))
