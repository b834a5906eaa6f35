"""The call itself: each public function of tileattn by its name, with the arguments that a `Call` means.

An adapter takes leaves: the tensors that gradients may be asked for, as :func:`run` made them from the call's. It
returns o and lse (None where it was not asked for), both as (batch, seqlen, ...) or (total, ...).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, restore_flash_attention_impl, sdpa_kernel

import tileattn
from tileattn import nn as modules
from tileattn import reference
from tileattn.compat import flash_attn, torch_sdpa
from tileattn.kernels.tilelang import buckets
from tileattn.testing import poisoned_memory
from tileattn.tuner.state import forget_prepared

from . import functions
from .spec import Call, mod_tensor, terms

Tensors = dict[str, Tensor]
Output = tuple[Tensor, Tensor | None]
OF_INPUTS = ("q", "k", "v")


def run(call: Call, t: Tensors) -> Tensors:
    """Makes the call on its tensors: outputs and the gradients that it asks for, by name."""
    with _settings(call, t["q"].device.type):
        leaves = {name: _leaf(x, name in call.grads) for name, x in t.items()}
        adapter = _compiled(ADAPTERS[call.adapter]) if call.compiled else ADAPTERS[call.adapter]
        o, lse = adapter(call, leaves)
        outcome = {"o": o.detach()}
        if call.lse:
            assert lse is not None
            outcome["lse"] = lse.detach()
        if not call.grads:
            return outcome
        outputs, gradients = [o], [t["do"]]
        if call.dlse and lse is not None:
            outputs, gradients = [*outputs, lse], [*gradients, t["dlse"]]
        wanted = [leaves[name] for name in call.grads]
        return outcome | dict(zip(call.grads, torch.autograd.grad(outputs, wanted, gradients)))


def _leaf(x: Tensor, wanted: bool) -> Tensor:
    return x.detach().requires_grad_() if wanted else x


def _compiled(adapter: Callable[..., Output]) -> Callable[..., Output]:
    torch._dynamo.reset()
    return torch.compile(adapter, backend="aot_eager")  # type: ignore[no-any-return]


def quantized(call: Call, t: Tensors) -> tuple[Tensors, Tensors]:
    """The tensors of a call in fp8, by `quantize_fp8`: as the call takes them, and as numbers for the oracle."""
    made = tileattn.quantize_fp8(*(t[name] for name in OF_INPUTS))._asdict()
    exact = {}
    for name in OF_INPUTS:
        descale = made[f"{name}_descale"].double()
        per_head = descale.repeat_interleave(t[name].shape[2] // descale.shape[1], dim=1)
        exact[name] = made[name].double() * per_head[:, None, :, None]
    return t | made, t | exact


def kept_weights(call: Call, device: str) -> Tensor:
    """What dropout multiplies each weight by, (elements, heads, rows, keys), as a call with the same seed shows it.

    All weights of the call are equal, and each key's value is 1 in a column of its own.
    """
    shape = (call.elements, call.heads, call.rows, call.keys)
    if 0 in shape:
        return torch.zeros(shape, dtype=torch.float64, device=device)
    q, k = (torch.zeros(call.elements, size, call.heads, 8, device=device) for size in (call.rows, call.keys))
    parts = []
    for first in range(0, call.keys, 256):
        count = min(256, call.keys - first)
        v = torch.zeros(call.keys, count, device=device)
        v[first : first + count] = torch.eye(count, device=device)
        v = v[None, :, None, :].expand(call.elements, -1, call.heads, -1)
        torch.manual_seed(call.seed)
        o = tileattn.attention(q, k, v, dropout_p=call.dropout, backend="torch")
        assert isinstance(o, Tensor)
        parts.append(o.permute(0, 2, 1, 3) != 0)
    p = round(call.dropout * 2**16) / 2**16
    return torch.cat(parts, dim=-1).double() * (0.0 if p == 1 else 1 / (1 - p))


@contextlib.contextmanager
def _settings(call: Call, device: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.enable_grad() if call.grads else torch.no_grad())
        if call.poisoned:
            stack.enter_context(poisoned_memory())
        if call.autocast:
            stack.enter_context(torch.autocast(device, dtype=call.torch_dtype))
        if call.bucket and call.bucket not in _inside:
            stack.enter_context(bucket(call.bucket))
        if call.adapter == "torch_sdpa" and device == "cuda":
            stack.enter_context(_activated())
        if call.dropout:
            torch.manual_seed(call.seed)
        yield


@contextlib.contextmanager
def _activated() -> Iterator[None]:
    """PyTorch's flash operators are tileattn's, those of the backward pass as well, and nothing else is chosen."""
    activate_flash_attention_impl("tileattn")
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield
    finally:
        restore_flash_attention_impl()


@contextlib.contextmanager
def bucket(name: str) -> Iterator[None]:
    """Kernels of this bucket of lengths. Calls prepared before are of another: forgotten on both sides."""
    forget_prepared()
    _inside.append(name)
    with buckets.only(name):
        yield
    _inside.remove(name)
    forget_prepared()


_inside: list[str] = []


# --- What the adapters share ---


def mask_of(call: Call, t: Tensors) -> Any:
    """The mask as tileattn takes it."""
    return None if call.mask is None else _mask(call.mask, iter([name for name, _ in terms(call.mask)]), t)


def _mask(mask: Any, names: Iterator[str], t: Tensors) -> Any:
    kind = mask[0]
    if kind in ("and", "or"):
        x, y = _as_mask(_mask(mask[1], names, t)), _as_mask(_mask(mask[2], names, t))
        return x & y if kind == "and" else x | y
    name = next(names)
    if kind == "causal":
        return tileattn.Causal()
    if kind == "window":
        return tileattn.SlidingWindow(mask[1], mask[2])
    if kind == "prefix":
        return tileattn.PrefixLM(mask[1])
    if kind == "prefixes":
        return tileattn.PrefixLM(t[name])
    if kind == "docs":
        return tileattn.Documents(t[name])
    if kind == "padding":
        return tileattn.KeyPadding(t[name])
    if kind == "dilated":
        return tileattn.Dilated(mask[1], mask[2], dilation=mask[3])
    if kind == "strided":
        return tileattn.Strided(mask[1], mask[2])
    if kind == "global":
        return tileattn.GlobalTokens(mask[1])
    if kind == "grid":
        return tileattn.Neighborhood(tuple(mask[1:3]), tuple(mask[3:5]))
    if kind == "images":
        return tileattn.ImageTextDocuments(t[name] // 4, t[name] % 4 - 1)
    if kind == "block_sparse":
        blocks = t[name]
        if mask[4] == "lists":
            blocks = torch.where(blocks, torch.arange(blocks.shape[3], device=blocks.device), -1).flip(-1).int()
        return tileattn.BlockSparse(blocks, (mask[2], mask[3]))
    return functions.mask(mask[1], mask[2], t.get(name))


def _as_mask(mask: Any) -> Any:
    return mask if isinstance(mask, tileattn.Mask) else tileattn.FunctionMask(mask)


def mods_of(call: Call, t: Tensors) -> list[Any]:
    """The modifications as tileattn takes them."""
    mods = []
    for number, mod in enumerate(call.mods):
        name = mod_tensor(number, mod)
        x = None if name is None else t[name]
        if mod[0] == "softcap":
            mods.append(tileattn.SoftCap(mod[1]))
        elif mod[0] == "alibi":
            mods.append(tileattn.ALiBi(x))
        elif mod[0] == "bias":
            mods.append(tileattn.Bias(x))
        else:
            mods.append(functions.score(mod[1], x))
    return mods


def _options(call: Call, t: Tensors) -> dict[str, Any]:
    mods = mods_of(call, t)
    return {
        "mask": mask_of(call, t),
        "score_mod": None if not mods else mods[0] if len(mods) == 1 else mods,
        "causal": call.causal,
        "scale": call.scale,
        "sink": t.get("sink"),
        "dropout_p": call.dropout,
        "return_lse": call.lse,
        "deterministic": call.deterministic,
        "backend": call.backend,
    }


def _pair(output: Any) -> Output:
    return (output, None) if isinstance(output, Tensor) else (output[0], output[1])


# --- tileattn's own functions ---


def _attention(call: Call, t: Tensors) -> Output:
    options = _options(call, t)
    if call.key_padding:
        options["key_padding_mask"] = t["key_padding"]
    for name in OF_INPUTS:
        if f"{name}_descale" in t:
            options[f"{name}_descale"] = t[f"{name}_descale"]
    q, k, v = (t[name] for name in OF_INPUTS)
    if call.layout == "bhsd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    o, lse = _pair(tileattn.attention(q, k, v, layout=call.layout, **options))
    return (o.transpose(1, 2) if call.layout == "bhsd" else o), lse


def _varlen(call: Call, t: Tensors) -> Output:
    lengths = (t["cu_q"], t["cu_k"], call.rows, call.keys)
    return _pair(tileattn.varlen_attention(t["q"], t["k"], t["v"], *lengths, **_options(call, t)))


def _padded(call: Call, t: Tensors) -> Output:
    """Packed sequences that went through a padded batch: pad_input, unpad_input, attention, and back the same way."""
    cu, seqlen = t["cu_q"].tolist(), max(call.rows, 1)
    places = torch.cat([torch.arange(b - a) + seqlen * i for i, (a, b) in enumerate(pairwise(cu))])
    places = places.to(t["q"].device)
    mask = torch.zeros(call.elements * seqlen, dtype=torch.bool, device=places.device).index_fill(0, places, True)
    mask = mask.view(call.elements, seqlen)
    packed = []
    for name in OF_INPUTS:
        batch = tileattn.pad_input(t[name], places, call.elements, seqlen)
        packed.append(tileattn.unpad_input(batch, mask))
    q, k, v = packed
    options = _options(call, t)
    lengths = (q.cu_seqlens, k.cu_seqlens, q.max_seqlen, k.max_seqlen)
    o, lse = _pair(tileattn.varlen_attention(q.x, k.x, v.x, *lengths, **options))
    back = tileattn.pad_input(o, q.indices, call.elements, seqlen)
    return back.flatten(0, 1)[places], lse


# --- PyTorch's function ---


def _sdpa(call: Call, t: Tensors) -> Output:
    q, k, v = (t[name].transpose(1, 2) for name in OF_INPUTS)
    o = tileattn.scaled_dot_product_attention(q, k, v, **_sdpa_options(call, t))
    return o.transpose(1, 2), None


def _sdpa_options(call: Call, t: Tensors) -> dict[str, Any]:
    bias = next((t[f"bias{number}"] for number, mod in enumerate(call.mods) if mod[0] == "bias"), None)
    bools = next((t[name] for name, term in terms(call.mask) if term[0] == "bools"), None)
    return {
        "attn_mask": bias if bools is None else bools,
        "dropout_p": call.dropout,
        "is_causal": call.causal,
        "scale": call.scale,
        "enable_gqa": call.group > 1,
    }


def _torch_sdpa(call: Call, t: Tensors) -> Output:
    """PyTorch's own function, tileattn activated; on a CPU, where it never chooses flash, the operators' kernels."""
    q, k, v = (t[name].transpose(1, 2) for name in OF_INPUTS)
    if t["q"].is_cuda:
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, **_sdpa_options(call, t))
        return o.transpose(1, 2), None
    return _Flash.apply(call, q, k, v).transpose(1, 2), None


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o, lse, *rest = torch_sdpa.scaled_dot_product_flash_attention(q, k, v, 0.0, call.causal, scale=call.scale)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.rest = call, rest
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        call, (cu_q, cu_k, max_q, max_k, state, unused, _) = ctx.rest
        numbers = (cu_q, cu_k, max_q, max_k, 0.0, call.causal, state, unused)
        grads = torch_sdpa.scaled_dot_product_flash_attention_backward(
            do, *ctx.saved_tensors, *numbers, scale=call.scale
        )
        return None, *grads


# --- flash-attn's functions ---


def _flash_options(call: Call, t: Tensors) -> dict[str, Any]:
    window = next((term for _, term in terms(call.mask)), None)
    alibi = next((t[f"alibi{number}"] for number, mod in enumerate(call.mods) if mod[0] == "alibi"), None)
    return {
        "dropout_p": call.dropout,
        "softmax_scale": call.scale,
        "causal": call.causal,
        "window_size": (-1, -1) if window is None else tuple(-1 if n is None else n for n in window[1:3]),
        "softcap": next((mod[1] for mod in call.mods if mod[0] == "softcap"), 0.0),
        "alibi_slopes": alibi,
        "deterministic": call.deterministic,
        "return_attn_probs": call.lse,
    }


def _flash(call: Call, t: Tensors) -> Output:
    options, (q, k, v) = _flash_options(call, t), (t[name] for name in OF_INPUTS)
    dim = -3
    if call.adapter == "fa":
        return _pair(flash_attn.flash_attn_func(q, k, v, **options))
    if call.adapter == "fa_kv":
        return _pair(flash_attn.flash_attn_kvpacked_func(q, torch.stack([k, v], dim), **options))
    if call.adapter == "fa_qkv":
        return _pair(flash_attn.flash_attn_qkvpacked_func(torch.stack([q, k, v], dim), **options))
    lengths = (t["cu_q"], t["cu_k"], call.rows, call.keys)
    if call.adapter == "fa_varlen":
        return _pair(flash_attn.flash_attn_varlen_func(q, k, v, *lengths, **options))
    if call.adapter == "fa_varlen_kv":
        return _pair(flash_attn.flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], dim), *lengths, **options))
    qkv = torch.stack([q, k, v], dim)
    return _pair(flash_attn.flash_attn_varlen_qkvpacked_func(qkv, t["cu_q"], call.rows, **options))


# --- Modules, and the readable reference ---


def _module(call: Call, t: Tensors) -> Output:
    """A module whose projections only pick: x is q, k and v side by side, so that queries, keys, values are exact.

    Its width is that of all three, and the output is in the part that q had.
    """
    q, k, v = (t[name] for name in OF_INPUTS)
    # Its parameters are never used: they take no memory.
    kind = {"device": "meta", "dtype": q.dtype, "bias": False, "causal": call.causal}
    own: dict[str, Any] = {"num_kv_heads": call.kv_heads}
    if call.module == "sliding_window":
        own["window_size"] = next(term[1] for _, term in terms(call.mask)) + 1
    elif call.module in ("masked", "naive"):
        own["mask"] = mask_of(call, t)
    elif call.module == "mqa":
        own = {}
    elif call.module in ("flash_v1", "flash_v2"):
        own["block_size"] = 16
    width = call.heads * call.head_dim
    module = modules.get_attention(call.module, width, call.heads, **own, **kind)
    module.out_proj = torch.nn.Identity()
    parts = [x.flatten(2) for x in (q, k, v)]
    if hasattr(module, "qkv_proj"):
        module.qkv_proj = _Given(torch.cat(parts, dim=-1))
    else:
        module.q_proj, module.k_proj, module.v_proj = map(_Given, parts)
    o, _ = module(q.flatten(2))
    return o.unflatten(-1, (call.heads, call.head_dim)), None


class _Given(torch.nn.Module):
    """A stand-in for a projection: it returns the tensor that it was given."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = x

    def forward(self, _: Tensor) -> Tensor:
        return self.x


def _reference(call: Call, t: Tensors) -> Output:
    mask = mask_of(call, t)
    if call.causal:
        mask = tileattn.Causal() if mask is None else tileattn.Causal() & _as_mask(mask)
    elif mask is not None:
        mask = _as_mask(mask)
    function = getattr(reference, call.module)
    return _pair(function(t["q"], t["k"], t["v"], mask, mods_of(call, t), t.get("sink"), call.scale))


ADAPTERS: dict[str, Callable[[Call, Tensors], Output]] = {
    "attention": _attention,
    "varlen": _varlen,
    "padded": _padded,
    "sdpa": _sdpa,
    "torch_sdpa": _torch_sdpa,
    "fa": _flash,
    "fa_kv": _flash,
    "fa_qkv": _flash,
    "fa_varlen": _flash,
    "fa_varlen_kv": _flash,
    "fa_varlen_qkv": _flash,
    "nn": _module,
    "reference": _reference,
}
