"""Which backend runs a call: one ordered table, and refusals that say why not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch

from ..call.facts import AttentionCall, BackwardCall, Gradients
from ..call.inputs import Inputs
from ..kernels.mma import backend as mma_backend
from ..kernels.tilelang import backend as tilelang_backend
from ..kernels.torch import backend as torch_backend
from ..kernels.triton import backend as triton_backend
from ..tuner import state
from ..tuner.space import Space


class Forward(Protocol):
    """The forward pass of a backend, prepared for tensors of one shape."""

    def __call__(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """O (batch, seqlen_q, heads, head_dim_v) and lse (batch, heads, seqlen_q), for the inputs of a call.

        o has the call's `out_dtype`. lse may be None where the call does not ask for it. Descales are there for fp8
        calls, always, and for no other: a backend that refuses fp8 need not know of them. So it is with dropout, and
        with packed.
        """
        ...


class Backward(Protocol):
    """The backward pass of a backend, prepared for tensors of one shape."""

    def __call__(
        self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None
    ) -> Gradients:
        """The gradients that the call wants.

        inputs are those of the forward pass, o and lse what it returned, do and dlse their gradients. o and do are bshd
        tensors of any strides (the last dimension is contiguous), as q, k and v are. dlse, (batch, heads, seqlen_q), is
        given where the call says so.
        """
        ...


@dataclass(frozen=True)
class Backend:
    """One implementation of attention.

    Attributes:
        name: what ``attention(backend=...)`` takes.
        summary: one line for people.
        refusal: why it does not run a call, or None where it does.
        reservation: why it runs a call only where it is named, or None.
        prepare: ``prepare(call, q.shape, k.shape, scale)`` is the forward pass for bshd tensors of these shapes; what
            depends on sizes alone (which kernel, how it is launched) is decided here, once. For a packed call the
            shapes are (sequences, max_seqlen, heads, head_dim).
        prepare_backward: ``prepare_backward(call, q.shape, k.shape, scale)``, the same for the backward pass of a call
            that it did not refuse and that needs gradients. None for a backend that refuses all of these.
        space: ``space(call, q.shape, k.shape, scale)`` is what the tuner may choose from for such a call; None where it
            has no choice. None, too, for a backend that is never tuned.
        backward_space: the same for the backward pass.
        configured: ``configured(options)`` is the backend with the options that may follow its name and a colon.
    """

    name: str
    summary: str
    refusal: Callable[[AttentionCall], str | None]
    reservation: Callable[[AttentionCall], str | None]
    prepare: Callable[[AttentionCall, torch.Size, torch.Size, float], Forward]
    prepare_backward: Callable[[BackwardCall, torch.Size, torch.Size, float], Backward] | None
    space: Callable[[AttentionCall, torch.Size, torch.Size, float], Space | None] | None = None
    backward_space: Callable[[BackwardCall, torch.Size, torch.Size, float], Space | None] | None = None
    configured: Callable[[str], Backend] | None = None


@functools.lru_cache(maxsize=256)
def _mma(options: str) -> Backend:
    """The ladder, or one rung of it with these options."""
    choice = mma_backend.parse(options)
    return Backend(
        "mma" + ":" * bool(options) + options,
        "CUDA C++ kernels with mma.sync, a ladder to learn from; only by name",
        functools.partial(mma_backend.refusal, choice),
        functools.partial(mma_backend.reservation, choice),
        functools.partial(mma_backend.prepare, choice),
        None,
        configured=_mma,
    )


# In order of preference: the first that accepts a call runs it.
BACKENDS: tuple[Backend, ...] = (
    Backend(
        "tilelang",
        "TileLang kernels, for GPUs",
        tilelang_backend.refusal,
        lambda call: None,
        tilelang_backend.prepare,
        tilelang_backend.prepare_backward,
        space=tilelang_backend.space,
        backward_space=tilelang_backend.backward_space,
    ),
    Backend(
        "triton",
        "Triton kernels, for GPUs: what the TileLang kernels refuse",
        triton_backend.refusal,
        triton_backend.reservation,
        triton_backend.prepare,
        triton_backend.prepare_backward,
    ),
    _mma(""),
    Backend(
        "torch",
        "PyTorch operations, for any device",
        torch_backend.refusal,
        lambda call: None,
        torch_backend.prepare,
        torch_backend.prepare_backward,
    ),
)


def select(call: AttentionCall, backend: str | None = None) -> Backend:
    """The backend that runs a call.

    Args:
        call: the call's static facts.
        backend: a name of :data:`BACKENDS`, which then runs the call or raises; None takes the first that accepts. The
            ladder's may name a rung and options, as in ``"mma:split_q,stages=1"``.

    Raises:
        ValueError: no backend has that name, or its options are wrong.
        NotImplementedError: the named backend (or every backend) refuses the call; the message says why.
    """
    _check_name(backend)
    return _select(call, backend)


_NAMES = tuple(candidate.name for candidate in BACKENDS)


def _check_name(backend: str | None) -> None:
    if backend is not None:
        named(backend)


def named(name: str) -> Backend:
    """The backend of a name, with the options in it.

    Raises:
        ValueError: there is none, or its options are wrong.
    """
    first, colon, options = str(name).partition(":")
    found = next((candidate for candidate in BACKENDS if candidate.name == first), None)
    if found is None or (colon and found.configured is None):
        raise ValueError(f"backend must be one of {', '.join(map(repr, _NAMES))} or None, got {name!r}")
    if found.configured is None or not colon:
        return found
    return found.configured(options)


@functools.lru_cache(maxsize=4096)
def _select(call: AttentionCall, backend: str | None) -> Backend:
    reasons = []
    for candidate in BACKENDS if backend is None else (named(backend),):
        reason = candidate.reservation(call) if backend is None else None
        reason = reason or candidate.refusal(call)
        if reason is None:
            return candidate
        reasons.append(f"{candidate.name}: {reason}")
    who = "no backend runs" if backend is None else f"backend={backend!r} does not run"
    raise NotImplementedError(f"{who} this call ({call}): " + "; ".join(reasons))


def prepare_forward(
    call: AttentionCall, backend: str | None, q_shape: torch.Size, k_shape: torch.Size, scale: float
) -> Forward:
    """The forward pass of the backend that runs a call, for bshd tensors of these shapes; raises as :func:`select`."""
    _check_name(backend)
    if state.session is not None:
        chosen = _select(call, backend)
        return _tuned(chosen.name, chosen.space, chosen.prepare, call, call.arch, (q_shape, k_shape, scale))
    return _prepare(call, backend, q_shape, k_shape, scale)


@functools.lru_cache(maxsize=4096)
def _prepare(
    call: AttentionCall, backend: str | None, q_shape: torch.Size, k_shape: torch.Size, scale: float
) -> Forward:
    return _select(call, backend).prepare(call, q_shape, k_shape, scale)


def prepare_backward(
    call: BackwardCall, backend: str | None, q_shape: torch.Size, k_shape: torch.Size, scale: float
) -> Backward:
    """The backward pass of the backend that runs the call's forward pass; raises as :func:`select`."""
    _check_name(backend)
    if state.session is not None:
        chosen = _select(call.forward, backend)
        sizes, arch = (q_shape, k_shape, scale), call.forward.arch
        assert chosen.prepare_backward is not None  # who has none refuses calls that need gradients
        return _tuned(chosen.name, chosen.backward_space, chosen.prepare_backward, call, arch, sizes)
    return _prepare_backward(call, backend, q_shape, k_shape, scale)


@functools.lru_cache(maxsize=4096)
def _prepare_backward(
    call: BackwardCall, backend: str | None, q_shape: torch.Size, k_shape: torch.Size, scale: float
) -> Backward:
    prepare = _select(call.forward, backend).prepare_backward
    assert prepare is not None  # who has none refuses calls that need gradients
    return prepare(call, q_shape, k_shape, scale)


Prepared = TypeVar("Prepared", bound=Callable[..., Any])


def _tuned(
    name: str,
    space: Callable[..., Space | None] | None,
    prepare: Callable[..., Prepared],
    call: AttentionCall | BackwardCall,
    arch: str,
    sizes: tuple[torch.Size, torch.Size, float],
) -> Prepared:
    """A pass inside `tileattn.tuning()`: its first call is tuned."""
    session = state.session
    assert session is not None
    found = None if space is None else space(call, *sizes)
    if found is None:
        if space is None:
            session.without_candidates(name, arch)
        return prepare(call, *sizes)
    return cast(Prepared, session.tunes(found, arch, lambda: prepare(call, *sizes)))


# What was prepared depends on the tuner's results.
state.forgets(_prepare.cache_clear)
state.forgets(_prepare_backward.cache_clear)
