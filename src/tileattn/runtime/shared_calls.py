"""Calls that the layers of a model's step repeat: prepared once, with one plan of the GPU's work for all layers.

The layers of a step have one mask, and tensors of equal metadata. So the mask is encoded once, the backend is prepared
once, and the plan of a decode phase is made once; layers on one stream share its workspace, too. Whoever keeps a
:class:`SharedCall` keeps it for one step: in the next one the lengths differ, and with them the mask and the plan. Its
key is :func:`key_of`; a call without a key is made in the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..call.decoding import DecodeInputs
from ..call.graph_memory import warms_up
from ..call.inputs import inputs_of
from ..tuner import state
from ..variant.key import encode, normalize
from ..variant.sparse.blocks import for_tensors
from . import operators as ops
from .decoding import DecodeOptions, prepared, with_variant
from .dispatch import prepare_forward
from .few_queries import FewQueries, repeat_of
from .prepared_decode import inputs_of as decode_inputs_of
from .run import is_plain, requires_grad, scale_or_default
from .tables import facts

Phase = Callable[[Any, "Tensor | None"], "tuple[Tensor, Tensor | None]"]
MakePlan = Callable[[Any], "Tensor | None"]
Launch = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], Tensor]
Repeat = Callable[[Any, "Tensor | None"], "Launch | None"]


def key_of(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, options: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """All that a call depends on besides the values of its tensors and the step's mask; None for one not to share.

    Not shared are calls that are traced, need gradients, or are made under autocast, torch.func or `tileattn.tuning`.

    options: the numbers and names that the caller passes on; of equal ones with different types, both have a key.
    """
    if not is_plain(q, k, v) or torch._C._is_any_autocast_enabled() or state.session is not None:
        return None
    if torch.is_grad_enabled() and requires_grad((q, k, v, sink)):
        return None
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, q.device, k.device,
        v.device, (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16, facts(sink), *map(type, options), options,
    )  # fmt: skip


def options_of(key: tuple[Any, ...]) -> Any:
    """The options in a key."""
    return key[-1]


class SharedCall:
    """A call without lse that the layers of a step repeat.

    Args:
        inputs: makes the inputs of the phase from q, k, v and the sink.
        phase: computes o and lse from the inputs and the plan, or makes its own plan if that is None.
        make_plan: makes the plan; None where there is none.
        repeat: makes a launch, with that plan, for all layers on one stream; it may return None: `phase` runs them.
    """

    def __init__(
        self, inputs: Callable[..., Any], phase: Phase, make_plan: MakePlan | None, repeat: Repeat | None = None
    ) -> None:
        self.inputs, self.phase, self.make_plan, self.repeat = inputs, phase, make_plan, repeat
        self.plan: Tensor | None = None
        self.launch: Launch | None = None
        self.stream: int | None = None  # on which the plan was made

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Tensor:
        """o of one layer; tensors have the metadata that the call was prepared for."""
        if self.make_plan is None or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
            return self.phase(self.inputs(q, k, v, sink), None)[0]  # in a CUDA graph each layer makes a plan
        stream = torch._C._cuda_getCurrentRawStream(q.device.index) if q.is_cuda else 0
        if self.stream != stream:  # another stream would not wait for the plan
            inputs = self.inputs(q, k, v, sink)
            if q.is_cuda and warms_up(q.device):
                return self.phase(inputs, None)[0]
            self.plan = self.make_plan(inputs)
            self.launch = None if self.repeat is None else self.repeat(inputs, self.plan)
            self.stream = stream
        if self.launch is not None:
            return self.launch(q, k, v, sink)
        return self.phase(self.inputs(q, k, v, sink), self.plan)[0]


def shared_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    mask: Any,
    score_mod: Any,
    causal: bool,
    scale: float | None,
    backend: str | None,
) -> SharedCall:
    """The shared call of :func:`tileattn.attention` for arguments that it has accepted, in the layout bshd."""
    whole, mods = normalize(mask, score_mod, causal)
    variant, operands = encode(for_tensors(whole, q, k), mods)
    fields = (operands, None, None, None, None)

    def inputs(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Any:
        return inputs_of((q, k, v, sink, *fields))

    call = ops.make_call(inputs(q, k, v, sink), variant, return_lse=False)
    forward = prepare_forward(call, backend, q.shape, k.shape, scale_or_default(scale, q))
    if isinstance(forward, FewQueries):
        return SharedCall(inputs, forward.run, forward.plan, forward.repeat)
    return SharedCall(inputs, lambda inputs, _: forward(inputs), None)


def shared_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    sink: Tensor | None,
    seqlens_k: Tensor,
    mask: Any,
    score_mod: Any,
    causal: bool,
    scale: float | None,
    backend: str | None,
) -> SharedCall:
    """The shared call of :func:`tileattn.decode` on contiguous caches, for arguments that it has accepted."""
    given = DecodeInputs(q, k_cache, v_cache, seqlens_k, sink=sink)
    variant, given = with_variant(given, q.shape[1], mask, score_mod, causal, None)
    options = DecodeOptions(variant, scale_or_default(scale, q), q.shape[1], None, False, backend)
    run, operands = prepared(given, options).run, given.operands

    def inputs(q: Tensor, k_cache: Tensor, v_cache: Tensor, sink: Tensor | None) -> Any:
        return decode_inputs_of((q, k_cache, v_cache, seqlens_k, None, None, sink, operands, None))

    return SharedCall(inputs, run, run.plan, repeat_of(run))
