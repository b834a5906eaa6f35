"""Draws random calls: first a structure (all that a kernel is compiled for), then its sizes, strides and values."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeVar

from .spec import PACKED_ADAPTERS, Call, mod_tensor, terms

T = TypeVar("T")

ADAPTERS = {
    "attention": 44, "varlen": 18, "sdpa": 8, "fa": 4, "fa_kv": 2, "fa_qkv": 2, "fa_varlen": 4, "fa_varlen_kv": 2,
    "fa_varlen_qkv": 2, "padded": 3, "nn": 5, "torch_sdpa": 2, "reference": 4,
}  # fmt: skip
MODULES = {
    "masked": 3, "gqa": 2, "mqa": 1, "sliding_window": 2, "naive": 1, "flash_v1": 1, "flash_v2": 1,
}  # fmt: skip
COMMON_DIMS = (16, 32, 64, 64, 128)
SIZES = (0, 1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 47, 63, 64, 65, 70, 96, 100, 111, 127, 128, 129, 150, 200, 255, 257, 300)
LONG_SIZES = (400, 511, 513, 640, 777, 1025)
GROUPS = (1, 1, 1, 2, 2, 3, 4, 5, 7, 8)
WINDOWS = (None, 0, 1, 2, 7, 16, 50, 64, 100, 1000)


class Draw:
    """One seeded stream of choices for a device and a backend (None: the one that dispatch takes)."""

    def __init__(self, seed: int | str, device: str, backend: str | None) -> None:
        self.random = random.Random(seed)
        self.device, self.backend = device, backend
        self.gpu = device != "cpu"
        self.least = 0

    def chance(self, p: float) -> bool:
        return self.random.random() < p

    def one(self, values: Sequence[T]) -> T:
        return self.random.choice(values)

    def weighted(self, weights: dict[T, int]) -> T:
        return self.random.choices(list(weights), list(weights.values()))[0]

    # --- Structures ---

    def structure(self) -> Call:
        adapter = self._adapter()
        call = Call(adapter=adapter, backend=self._named(adapter))
        call = call.replace(dtype=self._dtype(adapter))
        call = call.replace(**self._head_dims(call))
        if adapter == "nn":
            call = call.replace(module=self._module(call))
        if adapter == "reference":
            call = call.replace(module=self.one(("standard_attention", "flash_attention_1", "flash_attention_2")))
        call = call.replace(**self._variant(call))
        takes_sink = adapter in ("attention", "varlen", "padded", "reference") and self.backend != "mma"
        if takes_sink and self.chance(0.2):
            call = call.replace(sink=self.one(("fp32", "fp32", call.dtype if call.dtype != "fp8" else "bf16")))
        if call.adapter in ("attention", "varlen", "sdpa") and self.chance(0.06) and self._drops(call):
            call = call.replace(dropout=self.one((0.1, 0.5, 0.9, 1.0)))
        call = call.replace(scale=self._scale_sign(call))
        if self.chance(0.03) and adapter in ("attention", "varlen", "sdpa") and call.dtype in ("fp16", "bf16"):
            call = call.replace(autocast=not self.gpu)
        call = call.replace(bias_aligned=self.chance(0.6))
        if self.gpu and self.backend != "mma" and call.dtype != "fp8" and self.chance(0.15):
            call = call.replace(strides=("odd", "dense", "dense"))
        return self._outputs(call)

    def _named(self, adapter: str) -> str | None:
        """Backends are named where an adapter takes a name; what dispatch would take as well, in one of five calls."""
        if adapter not in ("attention", "varlen"):
            return None
        if self.backend is None and self.chance(0.2):
            return "tilelang" if self.gpu else "torch"
        return self.backend

    def _adapter(self) -> str:
        if self.backend in ("triton", "mma"):
            return "attention"
        if self.gpu and self.backend == "torch":
            return self.one(("attention", "varlen"))
        adapters = dict(ADAPTERS)
        if self.gpu:
            del adapters["reference"]
        return self.weighted(adapters)

    def _dtype(self, adapter: str) -> str:
        flash = adapter[:2] == "fa" or adapter == "torch_sdpa"
        if self.backend == "mma" or (self.gpu and (flash or self.backend in (None, "tilelang"))):
            is_8_bit = adapter == "attention" and self.backend is None and self.chance(0.08)
            return "fp8" if is_8_bit else self.one(("bf16", "bf16", "fp16"))
        if self.backend == "triton":
            return self.one(("bf16", "fp16", "fp32", "fp32"))
        if adapter == "attention" and self.chance(0.04):
            return "fp8"
        return self.weighted({"bf16": 33, "fp16": 20, "fp32": 37, "fp64": 10})

    def _head_dims(self, call: Call) -> dict[str, int]:
        if self.backend == "mma":
            return dict.fromkeys(("head_dim", "head_dim_v"), self.one((64, 128)))
        pads = call.adapter == "sdpa" or call.adapter[:2] == "fa"
        by_eight = self.gpu and self.backend in (None, "tilelang") and not pads
        if self.gpu and call.dtype == "fp8":
            return {"head_dim": 16 * self.random.randint(1, 16), "head_dim_v": 16 * self.random.randint(1, 16)}
        head_dim = self._head_dim(by_eight)
        same = call.adapter[:2] == "fa" or call.adapter in ("nn", "torch_sdpa") or self.chance(0.75)
        return {"head_dim": head_dim, "head_dim_v": head_dim if same else self._head_dim(by_eight)}

    def _head_dim(self, by_eight: bool) -> int:
        if self.chance(0.5):
            return self.one(COMMON_DIMS)
        if by_eight or self.chance(0.5):
            return 8 * self.random.randint(2, 32)
        return self.random.randint(1, 256)

    def _module(self, call: Call) -> str:
        if self.gpu:
            return self.one(("masked", "gqa", "mqa", "sliding_window"))
        module = self.weighted(MODULES)
        # In 16 bits it rounds its matrix of scores, which is what it is there to show.
        return "masked" if module == "naive" and call.dtype in ("bf16", "fp16") else module

    def _drops(self, call: Call) -> bool:
        return self.backend in (None, "torch", "tilelang") and call.dtype != "fp8"

    def _scale_sign(self, call: Call) -> float | None:
        if call.adapter in ("nn",) or self.chance(0.5):
            return None
        return self.weighted({1.0: 8, -1.0: 1, 0.0: 1})

    def _variant(self, call: Call) -> dict[str, Any]:
        adapter = call.adapter
        causal = self.chance(0.3)
        if self.backend == "mma":
            return {"causal": causal}
        if adapter == "nn":
            return self._module_variant(call, causal)
        if adapter == "torch_sdpa":
            return {"causal": causal, "top": True}
        if adapter == "sdpa":
            return self._sdpa_variant(call, causal)
        if adapter[:2] == "fa":
            mods = [["softcap", 15.0]] if self.chance(0.2) else []
            mods += [["alibi", self.one(("h", "bh")), "fp32"]] if self.chance(0.2) else []
            mask = ["window", self._bound(), self._bound()] if self.chance(0.4) else None
            if mask is not None and causal:
                mask[2] = 0  # with causal, right is 0
            return {"causal": causal, "mask": mask, "mods": tuple(mods)}
        mask = self._mask() if self.chance(0.55) else None
        mods = () if self.chance(0.5) else tuple(self._mod(call) for _ in range(self.one((1, 1, 1, 2))))
        key_padding = adapter == "attention" and self.chance(0.1)
        return {"causal": causal, "mask": mask, "mods": mods, "key_padding": key_padding}

    def _bound(self) -> int | None:
        return None if self.chance(0.3) else 1

    def _module_variant(self, call: Call, causal: bool) -> dict[str, Any]:
        if call.module == "sliding_window":
            return {"causal": causal, "mask": ["window", 1, 1]}
        return {"causal": causal, "mask": self._mask() if call.module in ("masked", "naive") else None}

    def _sdpa_variant(self, call: Call, causal: bool) -> dict[str, Any]:
        dims = self.one(("bhqk", "11qk", "b11k", "1h1k", "b1qk", "111k"))
        kind = self.one(("none", "none", "bools", "bias"))
        if kind == "none" or causal:
            return {"causal": causal, "top": True}
        if kind == "bools":
            return {"mask": ["bools", dims], "top": True}
        dtype = self.one(("fp32", call.dtype)) if call.dtype != "fp8" else "fp32"
        return {"mods": (["bias", dims, dtype],), "top": True}

    def _mask(self, depth: int = 0) -> list[Any]:
        if depth < 2 and self.chance(0.25 if depth == 0 else 0.15):
            return [self.one(("and", "or")), self._mask(depth + 1), self._mask(depth + 1)]
        kind = self.weighted({
            "causal": 3, "window": 6, "prefix": 3, "prefixes": 3, "docs": 6, "padding": 5, "fn": 6, "dilated": 2,
            "strided": 2, "global": 2, "grid": 2, "images": 2, "block_sparse": 6,
        })  # fmt: skip
        if kind == "dilated":
            return [kind, self._bound(), self._bound(), 1]
        if kind in ("strided", "global", "grid"):
            return [kind, *[1] * {"strided": 2, "global": 1, "grid": 4}[kind]]
        if kind == "block_sparse":
            size = self.one(((64, 64), (128, 128), (1, 16), (48, 32), (16, 256)))
            return [kind, self.one(("h", "g", "1")), *size, self.one(("bools", "lists"))]
        if kind == "window":
            return [kind, self._bound(), self._bound()]
        if kind in ("prefix", "prefixes"):
            return [kind, 1]
        if kind == "docs":
            return [kind, self.weighted({"sorted": 3, "any": 2, "int64": 1, "huge": 1})]
        if kind == "padding":
            return [kind, self.one(("right", "left", "holes"))]
        return (
            [kind, self.one(("stripes", "first_head", "blocks", "table")), self.one((1, 2, 3, 7, 30))]
            if kind == "fn"
            else [kind]
        )

    def _mod(self, call: Call) -> list[Any]:
        kind = self.weighted({"softcap": 3, "alibi": 3, "bias": 4, "fn": 6})
        dtype = "fp64" if call.dtype == "fp64" and self.chance(0.5) else self.one(("fp32", "fp32", "bf16", "fp16"))
        if kind == "softcap":
            return [kind, self.one((1.0, 15.0, 50.0))]
        if kind == "alibi":
            return [kind, self.one(("h", "bh", "1h")), dtype]
        if kind == "bias":
            return [kind, self.one(("bhqk", "bhqk", "1hqk", "b1qk", "11qk", "bh1k", "111k")), dtype]
        names = ("slopes", "keybias", "gate", "temperature", "relative", "squash", "hidden", "decay", "odd_heads")
        return [kind, self.one(names), dtype]

    def _outputs(self, call: Call) -> Call:
        """What is returned, and which gradients are asked for."""
        has_lse = call.adapter in ("attention", "varlen", "padded", "reference") or call.adapter[:2] == "fa"
        lse = has_lse and (call.adapter == "reference" or self.chance(0.5))
        names = ["q", "k", "v"] + ["sink"] * (call.sink is not None)
        # A factor of a score of -inf has the slope -inf, and 0 times that is NaN in PyTorch's own gradient as well.
        hiding = next((number for number, mod in enumerate(call.mods) if mod[:2] == ["fn", "hidden"]), len(call.mods))
        names += [name for number, mod in enumerate(call.mods[:hiding]) if (name := mod_tensor(number, mod))]
        grads: list[str] = []
        if call.dtype != "fp8" and self.backend != "mma" and not self.chance(0.2):
            grads = names
            if self.chance(0.35) and call.adapter not in ("torch_sdpa",):
                grads = [name for name in names if self.chance(0.5)] or [self.one(names)]
        flash_probs = call.adapter[:2] == "fa" and call.dropout
        dlse = lse and bool(grads) and grads != ["v"] and self.chance(0.5) and not flash_probs
        flags = {"deterministic": self.chance(0.1) and call.adapter in ("attention", "varlen", "fa")}
        layout = "bhsd" if call.adapter == "attention" and self.chance(0.3) else "bshd"
        return call.replace(lse=lse, grads=tuple(grads), dlse=dlse, layout=layout, **flags)

    # --- Sizes and values ---

    def sizes(self, structure: Call, budget: int) -> Call:
        """A call of the structure with at most `budget` scores (and a few tokens more)."""
        call = structure.replace(
            seed=self.random.randrange(2**31),
            values=self.weighted({"normal": 8, "offset": 1, "integers": 1, "sparse": 1, "constant": 1}),
            q_size=self.one((1.0, 1.0, 1.0, 0.1, 4.0)),
            v_size=self.one((1.0, 1.0, 1.0, 0.01, 30.0)),
            poisoned=self.chance(0.25),
        )
        slow = self.backend == "triton" and not self.gpu  # the interpreter runs one block after another
        kv_heads = 1 if call.module == "mqa" else self.random.randint(1, 2 if slow else 3)
        call = call.replace(kv_heads=kv_heads, group=self.one((1, 1, 2, 3)) if slow else self._group(call))
        # A kernel is compiled for which dimensions of its variant's tensors are 1.
        self.least = 2 if self.gpu and has_tensors(structure) else 0
        if call.heads < self.least:
            call = call.replace(kv_heads=2)
        if call.adapter in PACKED_ADAPTERS:
            call = call.replace(**self._lengths(call, budget))
        else:
            call = call.replace(**self._dense(call, budget))
        call = call.replace(**self._numbers(call))
        call = call.replace(strides=self._strides(call))
        plain = call.adapter in ("attention", "varlen", "sdpa") and call.backend != "triton" and call.dtype != "fp8"
        if not self.gpu and plain and not call.dropout and not call.autocast and self.chance(0.01):
            call = call.replace(compiled=True, poisoned=False)  # seconds each
        return call

    def _group(self, call: Call) -> int:
        if call.adapter in ("fa_qkv", "fa_varlen_qkv") or call.module in ("flash_v1", "flash_v2"):
            return 1
        return self.one(GROUPS)

    def _size(self, most: int) -> int:
        sizes = SIZES if self.chance(0.97) else LONG_SIZES
        fitting = [size for size in sizes if size <= most and (size == 0 or size >= self.least)]
        return self.one(fitting or [max(most, self.least)])

    def _dense(self, call: Call, budget: int) -> dict[str, Any]:
        batch = (
            0
            if self.chance(0.01) and call.adapter != "torch_sdpa"
            else self.random.randint(max(self.least, 1), 3 if self.gpu or self.backend != "triton" else 2)
        )
        same = call.adapter in ("nn", "fa_qkv") or (call.adapter == "torch_sdpa" and call.causal) or self.chance(0.4)
        most = int((budget / max(batch * call.heads, 1)) ** 0.5)
        seqlen_q = self._size(max(most, 1))
        seqlen_k = seqlen_q if same else self._size(max(most, 1))
        if call.adapter in ("nn", "torch_sdpa"):
            seqlen_q, seqlen_k = max(seqlen_q, 1), max(seqlen_k, 1)
        return {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}

    def _lengths(self, call: Call, budget: int) -> dict[str, Any]:
        count = 0 if self.chance(0.01) and call.adapter != "padded" else self.random.randint(max(self.least, 1), 5)
        same = call.adapter in ("fa_varlen_qkv", "padded") or self.chance(0.4)
        most = max(1, int((budget / max(count * call.heads, 1)) ** 0.5))
        of_q = tuple(self._size(most) for _ in range(count))
        of_k = of_q if same else tuple(self._size(most) for _ in range(count))
        loose = call.adapter != "padded"
        tail = self.one((0, 0, 0, 1, 17)) * loose
        slack = self.one((0, 0, 0, 1, 40)) * loose
        if min(max(of_q, default=2), max(of_k, default=2)) + slack == 1 == self.least - 1:
            slack = 1
        return {"lengths_q": of_q, "lengths_k": of_k, "tail": tail, "slack": slack}

    def _numbers(self, call: Call) -> dict[str, Any]:
        """Run-time numbers: windows, prefixes, caps, the scale."""
        longest = max(call.keys, 1)
        numbers: dict[str, Any] = {"mask": self._numbered(call.mask, longest, call)}
        if call.scale is not None and call.scale != 0:
            numbers["scale"] = call.scale * self.one((0.05, call.head_dim**-0.5, 0.3, 1.0))
        numbers["mods"] = tuple(
            [mod[0], round(self.random.uniform(0.5, 60), 3)] if mod[0] == "softcap" else mod for mod in call.mods
        )
        return numbers

    def _numbered(self, mask: Any, longest: int, call: Call) -> Any:
        if mask is None:
            return None
        if mask[0] in ("and", "or"):
            return [mask[0], self._numbered(mask[1], longest, call), self._numbered(mask[2], longest, call)]
        if mask[0] == "window":
            left, right = (None if bound is None else self.one(WINDOWS[1:]) for bound in mask[1:])
            if left is not None and self.gpu and call.adapter[:2] == "fa":
                left = min(left, max(longest - 1, 0))  # beyond it is no window, and another kernel
            if call.module == "sliding_window":
                return ["window", left, 0 if call.causal else left]
            return ["window", left, 0 if call.causal and call.adapter[:2] == "fa" and right is not None else right]
        if mask[0] == "dilated":
            bounds = (None if bound is None else self.one(WINDOWS[1:]) for bound in mask[1:3])
            return [mask[0], *bounds, self.one((1, 2, 3, 7, 64))]
        if mask[0] == "strided":
            return [mask[0], self.one((1, 2, 5, 64)), self.one((0, 1, 3, 40))]
        if mask[0] == "global":
            return [mask[0], self.random.randint(0, longest + 5)]
        if mask[0] == "grid":
            sides = [self.one((1, 2, 5, 8, 13)) for _ in range(2)]
            return [mask[0], *sides, *[self.random.randint(1, side) for side in sides]]
        if mask[0] in ("prefix", "prefixes"):
            return [mask[0], self.random.randint(0, longest + 5)]
        return mask

    def _strides(self, call: Call) -> tuple[str, ...]:
        """The strides of q, k and v; on a GPU the structure decides: aligned, or q's rows at odd addresses."""
        kinds = {"dense": 5, "heads": 2, "slice": 3, "odd": 2, "batch0": 1, "seq0": 1, "heads0": 1}
        aligned = {kind: kinds[kind] for kind in ("dense", "heads", "slice", "batch0")}
        if not self.gpu:
            return tuple(self.weighted(kinds) for _ in "qkv")
        if call.strides[0] == "odd":
            return "odd", self.weighted(kinds), self.weighted(kinds)
        return tuple(self.weighted(aligned) for _ in "qkv")


def has_tensors(call: Call) -> bool:
    """Whether the call's variant reads tensors."""
    kinds = {term[0] for _, term in terms(call.mask)} | {term[1] for _, term in terms(call.mask) if term[0] == "fn"}
    reads = bool(kinds & {"prefixes", "docs", "padding", "bools", "table", "images", "block_sparse"})
    return reads or call.key_padding or any(mod_tensor(number, mod) for number, mod in enumerate(call.mods))
