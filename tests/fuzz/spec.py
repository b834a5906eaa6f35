"""A call as a value: all that decides what is computed, in numbers, strings and lists, so that JSON holds it.

A **mask** is a list: ``["causal"]``, ``["window", left, right]``, ``["prefix", n]``, ``["prefixes", n]`` (a tensor of
lengths up to n), ``["docs", kind]``, ``["padding", kind]``, ``["bools", dims]`` (a boolean tensor over rows and keys),
``["dilated", left, right, step]``, ``["strided", stride, local]``, ``["global", n]``, ``["grid", height, width, window,
window]``, ``["images"]``, ``["block_sparse", heads, rows, keys, form]`` (heads: "h", "g" for kv heads, or "1"; form:
"bools" or "lists"), ``["fn", name, number]`` (a user's function), ``["and", x, y]``, ``["or", x, y]``. A
**modification** is one of ``["softcap", cap]``, ``["alibi", dims, dtype]``, ``["bias", dims, dtype]``, ``["fn", name,
dtype]``. `dims` is a string such as ``"b1qk"``, with 1 where the tensor is broadcast.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8": torch.float8_e4m3fn,
}
PACKED_ADAPTERS = ("varlen", "fa_varlen", "fa_varlen_kv", "fa_varlen_qkv", "padded")


@dataclass(frozen=True)
class Call:
    """One call; the defaults are the plainest call there is, to which a failing one is shrunk.

    Attributes:
        seed: of the values.
        adapter: the function that is called; see :mod:`fuzz.adapters`.
        backend: as `attention` takes it.
        dtype: of q, k and v, a name of `DTYPES`; under `autocast` what they are cast to.
        batch, seqlen_q, seqlen_k, kv_heads, group: sizes; `group` query heads share one of `kv_heads`.
        lengths_q, lengths_k: of packed sequences, in place of batch and seqlens; None for a dense call.
        tail: unused rows behind the last sequence; slack: how much larger max_seqlen is than the longest length.
        causal: the argument; mask and mods: as above; key_padding: the argument of that name.
        top: positions are aligned top-left, as in PyTorch's function.
        scale: None is the default.
        strides: of q, k and v: see :mod:`fuzz.values`.
        bias_aligned: whether a bias's rows begin at multiples of 16 bytes.
        grads: names of the tensors whose gradients are asked for.
        lse: lse is returned; dlse: it has a gradient.
        module: the class of `nn` (adapter "nn"), or the function of `reference` (adapter "reference").
        compiled: under torch.compile. poisoned: memory that was not written is NaN.
        bucket: on a GPU, "long" for the kernels of long sequences at any length.
    """

    seed: int = 0
    adapter: str = "attention"
    backend: str | None = None
    dtype: str = "fp32"
    head_dim: int = 16
    head_dim_v: int = 16
    batch: int = 1
    seqlen_q: int = 1
    seqlen_k: int = 1
    kv_heads: int = 1
    group: int = 1
    lengths_q: Any = None
    lengths_k: Any = None
    tail: int = 0
    slack: int = 0
    causal: bool = False
    mask: Any = None
    mods: Any = ()
    key_padding: bool = False
    top: bool = False
    sink: str | None = None
    scale: float | None = None
    dropout: float = 0.0
    layout: str = "bshd"
    strides: Any = ("dense", "dense", "dense")
    bias_aligned: bool = True
    grads: Any = ()
    lse: bool = False
    dlse: bool = False
    values: str = "normal"
    q_size: float = 1.0
    v_size: float = 1.0
    deterministic: bool = False
    autocast: bool = False
    module: str | None = None
    compiled: bool = False
    poisoned: bool = False
    bucket: str | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def leaf_dtype(self) -> torch.dtype:
        """The dtype of q, k and v as they are given."""
        return torch.float32 if self.autocast else self.torch_dtype

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def packed(self) -> bool:
        return self.lengths_q is not None

    @property
    def elements(self) -> int:
        """Batch elements, or sequences."""
        return len(self.lengths_q) if self.packed else self.batch

    @property
    def rows(self) -> int:
        """Query rows of an element, of packed sequences `max_seqlen_q`."""
        return max(self.lengths_q, default=0) + self.slack if self.packed else self.seqlen_q

    @property
    def keys(self) -> int:
        return max(self.lengths_k, default=0) + self.slack if self.packed else self.seqlen_k

    @property
    def scale_value(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def replace(self, **changes: Any) -> Call:
        return dataclasses.replace(self, **changes)

    def changed(self) -> dict[str, Any]:
        """What differs from the plainest call."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }

    def to_json(self) -> str:
        return json.dumps(self.changed())

    @classmethod
    def from_json(cls, text: str) -> Call:
        """The call that `to_json` wrote; lists become tuples where a call has tuples."""
        given = json.loads(text)
        for name in ("lengths_q", "lengths_k", "strides", "grads"):
            if given.get(name) is not None:
                given[name] = tuple(given[name])
        given["mods"] = tuple(given.get("mods", ()))
        return cls(**given)


def terms(mask: Any) -> Iterator[tuple[str, list[Any]]]:
    """The parts of a mask that are not `and` or `or`, each with the name of its tensor if it has one."""
    for number, term in enumerate(_leaves(mask)):
        yield f"{term[0]}{number}", term


def _leaves(mask: Any) -> Iterator[list[Any]]:
    if mask is None:
        return
    if mask[0] in ("and", "or"):
        yield from _leaves(mask[1])
        yield from _leaves(mask[2])
    else:
        yield mask


def mod_tensor(number: int, mod: list[Any]) -> str | None:
    """The name of the tensor that the modification of this number reads, or None."""
    if mod[0] in ("alibi", "bias"):
        return f"{mod[0]}{number}"
    return f"{mod[1]}{number}" if mod[0] == "fn" and mod[1] in FUNCTION_TENSORS else None


# The tensors that functions capture: their dimensions.
FUNCTION_TENSORS = {"slopes": "h", "keybias": "bk", "gate": "h", "temperature": ""}


def tensor_dims(mod: list[Any]) -> str:
    """The dimensions of the tensor that a modification reads."""
    return mod[1] if mod[0] in ("alibi", "bias") else FUNCTION_TENSORS[mod[1]]
