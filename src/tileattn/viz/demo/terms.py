"""The masks and score modifications of the page, as terms of a `Call`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tileattn.bench.variants import written_out
from tileattn.variant.masks import Causal, Documents, FunctionMask, Mask, PrefixLM, SlidingWindow
from tileattn.variant.scores import ALiBi, Bias, SoftCap
from tileattn.viz.demo.call import Call, Made, Term
from tileattn.viz.demo.function import MASK, SCORE, Typed


def causal() -> Term:
    return Term("Causal()", lambda made: Causal(), ("Causal",))


def window(left: int, right: int) -> Term:
    return Term(f"SlidingWindow({left}, {right})", lambda made: SlidingWindow(left, right), ("SlidingWindow",))


def prefix(size: int) -> Term:
    return Term(f"PrefixLM({size})", lambda made: PrefixLM(size), ("PrefixLM",))


def documents(size: int) -> Term:
    def setup(call: Call, device: str) -> str:
        return f"ids = torch.arange({call.seqlen_k}, device={device}, dtype=torch.int32) // {size}"

    def draw(call: Call, device: torch.device) -> Tensor:
        return torch.arange(call.seqlen_k, device=device, dtype=torch.int32) // size

    return Term("Documents(ids)", lambda made: Documents(made["ids"]), ("Documents",), (), setup, ("ids", draw))


def typed_mask(typed: Typed) -> Term:
    def make(made: Made) -> Mask:
        return FunctionMask(typed.fn)

    return Term("FunctionMask(my_mask)", make, ("FunctionMask",), typed.names, _definition("my_mask", MASK, typed))


def softcap(cap: float) -> Term:
    return Term(f"SoftCap({written_out(cap)})", lambda made: SoftCap(cap), ("SoftCap",))


def alibi() -> Term:
    def setup(call: Call, device: str) -> str:
        return f"slopes = 2.0 ** (-8.0 * torch.arange(1, {call.heads} + 1, device={device}) / {call.heads})"

    def draw(call: Call, device: torch.device) -> Tensor:
        return 2.0 ** (-8.0 * torch.arange(1, call.heads + 1, device=device) / call.heads)

    return Term("ALiBi(slopes)", lambda made: ALiBi(made["slopes"]), ("ALiBi",), (), setup, ("slopes", draw))


def bias() -> Term:
    def setup(call: Call, device: str) -> str:
        shape = f"1, {call.heads}, {call.seqlen_q}, {call.seqlen_k}"
        return f"bias = torch.randn({shape}, device={device}, dtype={call.value_dtype})"

    def draw(call: Call, device: torch.device) -> Tensor:
        return torch.randn(1, call.heads, call.seqlen_q, call.seqlen_k, device=device, dtype=call.value_dtype)

    return Term("Bias(bias)", lambda made: Bias(made["bias"]), ("Bias",), (), setup, ("bias", draw))


def typed_score(typed: Typed) -> Term:
    return Term("my_score", lambda made: typed.fn, (), typed.names, _definition("my_score", SCORE, typed))


def sink() -> Term:
    def setup(call: Call, device: str) -> str:
        return f"sink = torch.randn({call.heads}, device={device})  # one logit for each head"

    def draw(call: Call, device: torch.device) -> Tensor:
        return torch.randn(call.heads, device=device)

    return Term("sink", lambda made: made["sink"], (), (), setup, ("sink", draw))


def _definition(name: str, arguments: tuple[str, ...], typed: Typed) -> Callable[[Call, str], str]:
    def setup(call: Call, device: str) -> str:
        return f"\n\ndef {name}({', '.join(arguments)}):\n    return {typed.text}\n\n"

    return setup
