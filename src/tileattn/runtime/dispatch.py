"""Dispatch: the ordered table of backends, and the choice of the backend that runs a call.

A backend refuses a call with a reason. If every candidate refuses, the error lists the reasons.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch

from ..call.appending import AppendCall
from ..call.decoding import DecodeCall, DecodeInputs, DecodeSizes, Splits
from ..call.facts import AttentionCall, BackwardCall, Gradients
from ..call.inputs import Inputs
from ..kernels.mma import backend as mma_backend
from ..kernels.tilelang import backend as tilelang_backend
from ..kernels.tilelang.decode import backend as tilelang_decode
from ..kernels.torch import backend as torch_backend
from ..kernels.torch.decode import backend as torch_decode
from ..kernels.triton import backend as triton_backend
from ..kernels.triton.decode import backend as triton_decode
from ..tuner import state
from ..tuner.space import Space
from ..variant.expression import nodes
from ..variant.program import program
from . import few_queries


class Forward(Protocol):
    """The forward pass of a backend, prepared for tensors of one shape."""

    def __call__(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns o (batch, seqlen_q, heads, head_dim_v) and lse (batch, heads, seqlen_q) for the inputs of a call.

        o has the call's `out_dtype`. lse may be None if the call does not ask for it. Inputs have descales if and only
        if the call is in fp8, so a backend that refuses fp8 can ignore them. The same holds for dropout and packed.
        """
        ...


class Backward(Protocol):
    """The backward pass of a backend, prepared for tensors of one shape."""

    def __call__(
        self, inputs: Inputs, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None
    ) -> Gradients:
        """Returns the gradients that the call asks for.

        inputs are those of the forward pass. o and lse are its results; do and dlse are their gradients. o and do are
        bshd tensors of any strides with a contiguous last dimension, like q, k and v. dlse (batch, heads, seqlen_q) is
        None unless the call has `dlse`.
        """
        ...


class Decode(Protocol):
    """The decode phase of a backend, prepared for a call of known sizes."""

    def plan(self, inputs: DecodeInputs) -> torch.Tensor | None:
        """Deals the call's work to blocks, on the device, without a synchronisation; None where nothing is dealt.

        Depends on seqlens_k, cu_seqlens_q and the operands that say which keys a mask can reach; not on the values of
        q and the caches.
        """
        ...

    def __call__(self, inputs: DecodeInputs, plan: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns o and lse.

        o is (batch, q_len, heads, head_dim_v), or packed (1, total_q, heads, head_dim_v); with ``inputs.out`` it is
        that tensor. lse is (batch, heads, q_len), or packed (1, heads, total_q), in float32 (float64 for float64); it
        may be None if the call does not ask for it. plan is what :meth:`plan` returned for the same lengths, or None,
        which makes the call plan for itself.
        """
        ...


@dataclass(frozen=True)
class DecodePhase:
    """What a backend has for :func:`tileattn.decode`.

    Attributes:
        refusal: ``refusal(call)`` says why the backend does not run a decode call; None if it does.
        reservation: ``reservation(call)`` says why it runs the call only if it is named; None otherwise.
        prepare: ``prepare(call, sizes, scale, splits)`` decides, once, all that depends on sizes alone.
        runs_attention: ``runs_attention(call, sizes)`` says whether it should also run an attention call of few queries
            (few_queries.py) that both it and the backend's forward pass accept.
    """

    refusal: Callable[[DecodeCall], str | None]
    reservation: Callable[[DecodeCall], str | None]
    prepare: Callable[[DecodeCall, DecodeSizes, float, Splits], Decode]
    runs_attention: Callable[[DecodeCall, DecodeSizes], bool] = lambda call, sizes: True


@dataclass(frozen=True)
class Backend:
    """One implementation of attention.

    Attributes:
        name: the value of ``attention(backend=...)``.
        summary: a one-line description.
        refusal: ``refusal(call)`` says why the backend does not run a call; None if it does.
        reservation: ``reservation(call)`` says why the backend runs a call only if it is named; None otherwise.
        prepare: ``prepare(call, q.shape, k.shape, scale)`` returns the forward pass for bshd tensors of these shapes.
            It makes, once, all decisions that depend on sizes alone (which kernel, how it is launched). For a packed
            call the shapes are (sequences, max_seqlen, heads, head_dim).
        prepare_backward: ``prepare_backward(call, q.shape, k.shape, scale)`` returns the backward pass of a call that
            needs gradients and is not refused. None for a backend that refuses all calls that need gradients.
        space: ``space(call, q.shape, k.shape, scale)`` returns the tuner's search space for the forward pass, or None
            if there is nothing to choose. The attribute is None for a backend that is never tuned.
        backward_space: the same for the backward pass.
        decode: the decode phase, or None.
        configured: ``configured(options)`` returns the backend with the options that follow its name and a colon. None
            for a backend without options.
    """

    name: str
    summary: str
    refusal: Callable[[AttentionCall], str | None]
    reservation: Callable[[AttentionCall], str | None]
    prepare: Callable[[AttentionCall, torch.Size, torch.Size, float], Forward]
    prepare_backward: Callable[[BackwardCall, torch.Size, torch.Size, float], Backward] | None
    space: Callable[[AttentionCall, torch.Size, torch.Size, float], Space | None] | None = None
    backward_space: Callable[[BackwardCall, torch.Size, torch.Size, float], Space | None] | None = None
    decode: DecodePhase | None = None
    configured: Callable[[str], Backend] | None = None


@functools.lru_cache(maxsize=256)
def _mma(options: str) -> Backend:
    """The mma backend: the ladder, or one rung of the ladder with these options."""
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


# The backends in order of preference: the first one that accepts a call runs it.
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
        decode=DecodePhase(tilelang_decode.refusal, tilelang_decode.reservation, tilelang_decode.prepare),
    ),
    Backend(
        "triton",
        "Triton kernels, for GPUs: what the TileLang kernels refuse",
        triton_backend.refusal,
        triton_backend.reservation,
        triton_backend.prepare,
        triton_backend.prepare_backward,
        decode=DecodePhase(triton_decode.refusal, triton_decode.reservation, triton_decode.prepare),
    ),
    _mma(""),
    Backend(
        "torch",
        "PyTorch operations, for any device",
        torch_backend.refusal,
        lambda call: None,
        torch_backend.prepare,
        torch_backend.prepare_backward,
        decode=DecodePhase(torch_decode.refusal, lambda call: None, torch_decode.prepare, torch_decode.runs_attention),
    ),
)


def select(call: AttentionCall, backend: str | None = None) -> Backend:
    """Selects the backend that runs a call.

    Args:
        call: the call's static facts.
        backend: the name of one of :data:`BACKENDS`; None selects the first that accepts the call. "mma" may be
            followed by a rung and options, as in ``"mma:split_q,stages=1"``.

    Raises:
        ValueError: no backend has that name, or its options are wrong.
        NotImplementedError: the named backend (or every backend) refuses the call; the message says why.
    """
    check_name(backend)
    return _select(call, backend)


_NAMES = tuple(candidate.name for candidate in BACKENDS)


def check_name(backend: str | None) -> None:
    """Raises ValueError if no backend has the name, or its options are wrong. It is asked before a cache is."""
    if backend is not None:
        named(backend)


def named(name: str) -> Backend:
    """The backend with this name, configured with the options that follow the name.

    Raises:
        ValueError: no backend has that name, or its options are wrong.
    """
    first, colon, options = str(name).partition(":")
    backend = next((candidate for candidate in BACKENDS if candidate.name == first), None)
    if backend is None or (colon and backend.configured is None):
        raise ValueError(f"backend must be one of {', '.join(map(repr, _NAMES))} or None, got {name!r}")
    if backend.configured is None or not colon:
        return backend
    return backend.configured(options)


@functools.lru_cache(maxsize=4096)
def _select(call: AttentionCall, backend: str | None) -> Backend:
    return first_that_accepts(call, backend, lambda candidate: (candidate.reservation, candidate.refusal))


Call = TypeVar("Call", AttentionCall, DecodeCall, AppendCall)
Answers = tuple[Callable[[Call], "str | None"], Callable[[Call], "str | None"]]  # a reservation and a refusal


def first_that_accepts(call: Call, backend: str | None, answers_of: Callable[[Backend], Answers[Call]]) -> Backend:
    """The first backend, or the named one, if it accepts the call. `answers_of` gives its reservation and refusal.

    Raises as :func:`select`.
    """
    reasons = []
    for candidate in BACKENDS if backend is None else (named(backend),):
        reservation, refusal = answers_of(candidate)
        reason = reservation(call) if backend is None else None
        reason = reason or refusal(call)
        if reason is None:
            return candidate
        reasons.append(f"{candidate.name}: {reason}")
    who = "no backend runs" if backend is None else f"backend={backend!r} does not run"
    raise NotImplementedError(f"{who} this call ({call}): " + "; ".join(reasons))


class PreparedDecode(NamedTuple):
    """The decode phase of the backend that runs a call.

    Attributes:
        run: the backend's phase for calls of these sizes.
        made_for: what a plan of it is made for (:class:`tileattn.call.decoding.DecodePlan`), but for numbers of a call.
        of_mask: the names of the numbers that the mask reads.
    """

    run: Decode
    made_for: str
    of_mask: tuple[str, ...]


def select_decode(call: DecodeCall, backend: str | None = None) -> Backend:
    """Selects the backend that runs a decode call. Raises as :func:`select`."""
    check_name(backend)
    return _select_decode(call, backend)


@functools.lru_cache(maxsize=4096)
def _select_decode(call: DecodeCall, backend: str | None) -> Backend:
    return first_that_accepts(call, backend, answers_for_decode)


def answers_for_decode(candidate: Backend) -> Answers[DecodeCall]:
    """The reservation and the refusal of a backend for decode calls."""
    phase = candidate.decode
    if phase is None:
        return (lambda call: None), (lambda call: "it does not decode")
    return phase.reservation, phase.refusal


def prepare_decode(
    call: DecodeCall, backend: str | None, sizes: DecodeSizes, scale: float, splits: Splits
) -> PreparedDecode:
    """The decode phase of the backend that runs a call of these sizes. Raises as :func:`select`."""
    check_name(backend)
    return _prepare_decode(call, backend, sizes, scale, splits)


@functools.lru_cache(maxsize=4096)
def _prepare_decode(
    call: DecodeCall, backend: str | None, sizes: DecodeSizes, scale: float, splits: Splits
) -> PreparedDecode:
    chosen = _select_decode(call, backend)
    assert chosen.decode is not None  # a backend without a decode phase refuses
    of_plan = dataclasses.replace(call, return_lse=True)  # whether lse is written changes no plan
    made_for = f"{chosen.name}: {of_plan}, {sizes}, splits={splits}"
    return PreparedDecode(chosen.decode.prepare(call, sizes, scale, splits), made_for, _numbers_of_mask(call.variant))


@functools.lru_cache(maxsize=1024)
def _numbers_of_mask(variant: str) -> tuple[str, ...]:
    """The names of the numbers that the mask of a variant key reads; with them the keys change that are visited."""
    traced = program(variant)
    read = [each for value in (traced.allows, *traced.kv_range, *traced.full_range) for each in nodes(value)]
    names = {str(each.args[0]) for each in read if each.op == "symbol"}
    return tuple(sorted(name for name in names if re.fullmatch(r"[if]\d+", name)))


def prepare_forward(
    call: AttentionCall, backend: str | None, q_shape: torch.Size, k_shape: torch.Size, scale: float
) -> Forward:
    """The forward pass of the backend that runs a call, for bshd tensors of these shapes. Raises as :func:`select`."""
    check_name(backend)
    if state.session is not None and not _decodes(call, backend, q_shape, k_shape):
        chosen = _select(call, backend)
        return _tuned(chosen.name, chosen.space, chosen.prepare, call, call.arch, (q_shape, k_shape, scale))
    return _prepare(call, backend, q_shape, k_shape, scale)


@functools.lru_cache(maxsize=4096)
def _prepare(
    call: AttentionCall, backend: str | None, q_shape: torch.Size, k_shape: torch.Size, scale: float
) -> Forward:
    chosen = _select(call, backend)
    forward = functools.partial(chosen.prepare, call, q_shape, k_shape, scale)
    if not _decodes(call, backend, q_shape, k_shape):
        return forward()
    phase = chosen.decode
    assert phase is not None
    facts, sizes = few_queries.decode_facts(call, q_shape, k_shape)
    return few_queries.FewQueries(lambda known: phase.prepare(facts, known, scale, None), forward, sizes)


def _decodes(call: AttentionCall, backend: str | None, q_shape: torch.Size, k_shape: torch.Size) -> bool:
    """Whether the backend that runs a call does so by its decode phase: few queries, many keys."""
    phase = _select(call, backend).decode
    if phase is None or not few_queries.are_few(call, q_shape, k_shape):
        return False
    facts, sizes = few_queries.decode_facts(call, q_shape, k_shape)
    return _runs_decode(phase.refusal, facts) and phase.runs_attention(facts, sizes)


@functools.lru_cache(maxsize=4096)
def _runs_decode(refusal: Callable[[DecodeCall], str | None], call: DecodeCall) -> bool:
    """Whether a decode phase accepts a call. It looks for packages on disk, and each length of a cache asks again."""
    return refusal(call) is None


def prepare_backward(
    call: BackwardCall, backend: str | None, q_shape: torch.Size, k_shape: torch.Size, scale: float
) -> Backward:
    """The backward pass of the backend that runs the call's forward pass. Raises as :func:`select`."""
    check_name(backend)
    if state.session is not None:
        chosen = _select(call.forward, backend)
        sizes, arch = (q_shape, k_shape, scale), call.forward.arch
        assert chosen.prepare_backward is not None  # a backend without one refuses calls that need gradients
        return _tuned(chosen.name, chosen.backward_space, chosen.prepare_backward, call, arch, sizes)
    return _prepare_backward(call, backend, q_shape, k_shape, scale)


@functools.lru_cache(maxsize=4096)
def _prepare_backward(
    call: BackwardCall, backend: str | None, q_shape: torch.Size, k_shape: torch.Size, scale: float
) -> Backward:
    prepare = _select(call.forward, backend).prepare_backward
    assert prepare is not None  # a backend without one refuses calls that need gradients
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
    """A prepared pass inside `tileattn.tuning()`, whose first call is tuned."""
    session = state.session
    assert session is not None
    configurations = None if space is None else space(call, *sizes)
    if configurations is None:
        if space is None:
            session.without_candidates(name, arch)
        return prepare(call, *sizes)
    return cast(Prepared, session.tunes(configurations, arch, lambda: prepare(call, *sizes)))


# Prepared passes depend on the tuner's results.
state.forgets(_prepare.cache_clear)
state.forgets(_prepare_backward.cache_clear)
state.forgets(_prepare_decode.cache_clear)
