"""The ``torch.library`` operators that torch.compile, torch.export and fake tensors see, and their implementation.

Eager calls bypass the operators, whose overhead is as long as a kernel launch: see ``prepared.py`` and ``autograd.py``.
An operator takes tensors and numbers as separate arguments, so this module flattens :class:`Inputs` for them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.expected import expecting
from ..call.facts import AttentionCall, BackwardCall, device_arch, is_aligned, sizes
from ..call.fp8 import FP8, accumulator, complete, output_dtype
from ..call.inputs import Inputs, Numbers, join
from ..tuner import state
from ..variant.key import constant_under_compile
from ..variant.program import with_alignment
from . import sharding
from .dispatch import Backward, prepare_backward, prepare_forward

# The descales of q, k and v as the user gave them, each of any shape that broadcasts to (batch, kv_heads).
GivenDescales = tuple[Tensor | None, Tensor | None, Tensor | None]
NO_DESCALES: GivenDescales = (None, None, None)


class Options(NamedTuple):
    """The options of a call that its forward and backward pass share.

    Attributes:
        variant: the key of the mask and the score modifications (:mod:`tileattn.variant.key`).
        scale: the factor of the scores.
        backend: the name of one of :data:`tileattn.runtime.dispatch.BACKENDS`, or None.
        deterministic: whether gradients must be bitwise equal from run to run.
        needs_grad: whether gradients may be asked for. The choice of the backend depends on it.
    """

    variant: str
    scale: float
    backend: str | None
    deterministic: bool = False
    needs_grad: bool = False


def make_call(inputs: Inputs, variant: str, *, needs_grad: bool = False, return_lse: bool = True) -> AttentionCall:
    """The static facts of a call with these inputs."""
    q, k, v, sink, operands, dropout, packed, *_ = inputs
    look = _asks_for_alignment(q)
    return AttentionCall(
        dtype=q.dtype,
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        variant=with_alignment(variant, operands.tensors) if look and operands.tensors else variant,
        sink=sink is not None,
        aligned=not look or (is_aligned(q) and is_aligned(k) and is_aligned(v)),
        needs_grad=needs_grad,
        return_lse=return_lse,
        arch=device_arch(q.device),
        dropout=dropout is not None,
        packed=packed is not None,
    )


def _asks_for_alignment(q: torch.Tensor) -> bool:
    """Whether the call asks for alignment: only GPU kernels need it, and traced tensors have no address."""
    return q.is_cuda and not torch.compiler.is_compiling()


def is_traced(tensor: Any) -> bool:
    """Whether the call must use the operator, for torch.compile, export, a dispatch mode or a tensor subclass.

    Meta tensors have shapes and no values; they use the operator, whose fake implementation computes shapes. Under
    torch.func the answer is False, as its tensors are wrapped; it is asked again after they are unwrapped.
    """
    return torch.compiler.is_compiling() or (
        (type(tensor) is not torch.Tensor or torch._C._len_torch_dispatch_stack() > 0 or _has_no_values(tensor))
        and not torch._C._are_functorch_transforms_active()
    )


def refuse_transforms(function: str) -> None:
    """Raises NotImplementedError under torch.func, in eager execution, for a function without derivatives."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"{function} is not transformed by torch.func: it has no derivatives, and a dimension that vmap would map "
            f"must be a part of the batch"
        )


def _has_no_values(tensor: torch.Tensor) -> bool:
    """Whether it is a meta tensor. benchmarks/precompile.py replaces this function to pass meta tensors for a GPU's."""
    return tensor.is_meta


# --- The forward pass ---


def run_forward(options: Options, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Runs a backend: o (batch, seqlen_q, heads, head_dim_v), contiguous, and lse (batch, heads, seqlen_q)."""
    variant, scale, backend, deterministic, needs_grad = options
    call = make_call(inputs, variant, needs_grad=needs_grad)
    with expecting(deterministic or is_deterministic(), inputs.operands):
        run = prepare_forward(call, backend, *sizes(inputs.q, inputs.k, inputs.packed), scale)
    o, lse = run(inputs)
    assert lse is not None
    return o, lse


def trace_forward(options: Options, inputs: Inputs, descales: GivenDescales = NO_DESCALES) -> tuple[Tensor, Tensor]:
    """The same as :func:`run_forward`, by the operator.

    Descales are a separate argument here, as the user gave them: the operator completes them.
    """
    _accept_dtensors()
    q, k, v, sink, operands, dropout, packed, *_ = inputs
    variant, scale, backend, deterministic, needs_grad = options
    numbers = (operands.ints, operands.floats, scale)
    flags = (deterministic, needs_grad, *(dropout[:2] if dropout else (0.0, None)), *(packed or ()))
    o, lse = forward(q, k, v, sink, variant, operands.tensors, *numbers, backend, *descales, *flags)
    return o, lse


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    variant: str,
    tensors: Sequence[Tensor],
    ints: Sequence[int],
    floats: Sequence[float],
    scale: float,
    backend: str | None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    deterministic: bool = False,
    needs_grad: bool = False,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
) -> tuple[Tensor, Tensor]:
    """The forward operator: :func:`run_forward` with inputs as separate arguments.

    o has q's dtype, or bfloat16 for fp8. Descales must broadcast to (batch, kv_heads) and are for fp8 only. The
    operator is differentiable in q, k, v, sink and tensors. `deterministic` asks for bitwise equal gradients.
    `needs_grad` says whether gradients may be asked for: a compiled graph does not know this itself, and the choice of
    the backend depends on it. With a seed, probabilities are dropped (:mod:`tileattn.call.dropout`). With cu_seqlens,
    the call is packed (:class:`tileattn.call.facts.Packed`).
    """
    numbers = Numbers(list(ints), list(floats), dropout_p, max_seqlen_q, max_seqlen_k)
    inputs = join(numbers, seed, cu_seqlens_q, cu_seqlens_k, q, k, v, sink, *tensors)
    if q.dtype == FP8:
        inputs = inputs._replace(descales=complete(q_descale, k_descale, v_descale, k))
    return run_forward(Options(variant, scale, backend, deterministic, needs_grad), inputs)


forward = torch.library.custom_op("tileattn::forward", _forward, mutates_args=())


@forward.register_fake
def _(q, k, v, *_):
    state.refuse_tracing()
    batch, seqlen_q, heads, _ = q.shape
    return (
        q.new_empty(batch, seqlen_q, heads, v.shape[3], dtype=output_dtype(q.dtype)),
        q.new_empty(batch, heads, seqlen_q, dtype=accumulator(q.dtype)),
    )


# --- The backward pass ---


def run_backward(
    options: Options, inputs: Inputs, needs: Sequence[bool], o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None
) -> list[Tensor]:
    """The gradients that `needs` asks for, of q, k, v, sink and the operands' tensors, contiguous.

    do and dlse are the gradients of o and lse, the results of the forward pass. options and inputs are those of the
    forward pass.
    """
    do = readable(do)
    run = prepared_backward(options, inputs, needs, o, do, dlse is not None)
    *of_inputs, of_tensors = run(inputs, o, lse, do, dlse)
    return [x.contiguous() for x in (*of_inputs, *of_tensors) if x is not None]


def prepared_backward(
    options: Options, inputs: Inputs, needs: Sequence[bool], o: Tensor, do: Tensor, dlse: bool
) -> Backward:
    """The backward pass for tensors with the metadata of these; dlse says whether lse has a gradient."""
    variant, scale, backend, deterministic, _ = options
    call = BackwardCall(
        make_call(inputs, variant, needs_grad=True),
        needs=tuple(needs),
        dlse=dlse,
        deterministic=deterministic or is_deterministic(),
        aligned=not _asks_for_alignment(inputs.q) or (is_aligned(o) and is_aligned(do)),
    )
    return prepare_backward(call, backend, *sizes(inputs.q, inputs.k, inputs.packed), scale)


def trace_backward(
    options: Options, inputs: Inputs, needs: Sequence[bool], o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None
) -> list[Tensor]:
    """The same as :func:`run_backward`, by the operator."""
    _accept_dtensors()
    q, k, v, sink, operands, dropout, packed, *_ = inputs
    variant, scale, backend, deterministic, _ = options
    numbers = (operands.ints, operands.floats, scale)
    flags = (deterministic, needs, *(dropout[:2] if dropout else (0.0, None)), *(packed or ()))
    return backward(do, dlse, q, k, v, o, lse, sink, variant, operands.tensors, *numbers, backend, *flags)


def readable(do: Tensor) -> Tensor:
    """The gradient of o with strides that kernels can read; copied if necessary.

    Autograd may give it any strides, such as 0 if o was summed.
    """
    reads = do.stride(3) == 1 and 0 not in do.stride() and (is_aligned(do) or not _asks_for_alignment(do))
    return do if reads else do.contiguous()


def is_deterministic() -> bool:
    """Whether `torch.use_deterministic_algorithms` is on and not in its mode that only warns."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    sink: Tensor | None,
    variant: str,
    tensors: Sequence[Tensor],
    ints: Sequence[int],
    floats: Sequence[float],
    scale: float,
    backend: str | None,
    deterministic: bool,
    needs: Sequence[bool],
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
) -> list[Tensor]:
    """The backward operator: :func:`run_backward` with inputs as separate arguments."""
    numbers = Numbers(list(ints), list(floats), dropout_p, max_seqlen_q, max_seqlen_k)
    inputs = join(numbers, seed, cu_seqlens_q, cu_seqlens_k, q, k, v, sink, *tensors)
    options = Options(variant, scale, backend, deterministic, needs_grad=True)
    return run_backward(options, inputs, needs, o, lse, do, dlse)


backward = torch.library.custom_op("tileattn::backward", _backward, mutates_args=())


@backward.register_fake
def _(do, dlse, q, k, v, o, lse, sink, variant, tensors, *others):
    needs = others[5]  # after ints, floats, scale, backend and deterministic
    return [x.new_empty(x.shape) for x, need in zip((q, k, v, sink, *tensors), needs) if need]


# --- DTensors ---


@constant_under_compile
def _accept_dtensors() -> None:
    """Registers the operators' shardings, once, where DTensor is imported: `import tileattn` does not import it."""
    if "torch.distributed.tensor" in sys.modules:
        _register_shardings()


@functools.cache
def _register_shardings() -> None:
    sharding.register(forward, backward, _forward, _backward)
