"""The tolerance rule, the keys of compiled kernels, and the pattern of dropout."""

from __future__ import annotations

from ..mutant import Mutant, mutants

NUMERICS = ("testing/test_tolerance_bounds.py", "testing/test_numerics.py")
RULE = "testing/numerics.py"
KEY = ("kernels/cache/test_key.py",)
LAUNCH = "kernels/tilelang/forward/library.py"
PATTERN = ("call/test_dropout.py",)

MUTANTS: list[Mutant] = [
    *mutants(
        RULE,
        NUMERICS,
        {
            "rule: four times eager's error": ("EAGER_FACTOR = 2.0", "EAGER_FACTOR = 4.0"),
            "rule: a whole rounding for lse": ("LSE_SHARE = 1 / 8", "LSE_SHARE = 1.0"),
            "rule: the best run of eager": ("EAGER_FACTOR * max(of_eager)", "EAGER_FACTOR * min(of_eager)"),
            "rule: two roundings": (
                "return max(torch.finfo(dtype).eps for",
                "return 2 * max(torch.finfo(dtype).eps for",
            ),
            "rule: NaN passes": ("assert not is_nan, f", "assert not is_nan or True, f"),
            "rule: infinities anywhere": ("assert not wrongly_infinite, (", "assert not wrongly_infinite or True, ("),
            "rule: rows without keys need not be 0": ("assert not misplaced, f", "assert not misplaced or True, f"),
            "rule: large rows hide small ones": (
                "difference.norm(dim=-1) / self.norms, ",
                "difference.norm(dim=-1) / self.norms.max(), ",
            ),
            "rule: terms do not count": ("torch.maximum(norms, size.double().norm(dim=-1))", "norms"),
        },
    ),
    *mutants(
        LAUNCH,
        KEY,
        {
            "key: without the aligned flag": ("aligned={call.aligned} ", ""),
            "key: without lse": (" lse={call.return_lse}", ""),
            "key: without the sink": ("sink={call.sink} ", ""),
            "key: without dropout": ("dropout={call.dropout} ", ""),
            "key: without v's head dim": (
                "{call.dtype} {call.head_dim} {call.head_dim_v} ",
                "{call.dtype} {call.head_dim} ",
            ),
            "key: without the variant": (" | {program(call.variant)}", ""),
            "key: without the configuration": ("forward | {facts} | {text} |", "forward | {facts} |"),
            "key: fp8 values of any architecture": ('{self.call.head_dim_v} {self.arch}"', '{self.call.head_dim_v}"'),
        },
    ),
    *mutants(
        "kernels/tilelang/build/library.py",
        KEY,
        {
            "key: without TileLang's version": ("tilelang {version('tilelang')}, ", ""),
            "key: without the compiler's version": (", {device_compiler()}", ""),
        },
    ),
    *mutants(
        "kernels/tilelang/packed/library.py",
        KEY,
        {"key: plans of any architecture": ("sequence_plan | {self.arch}", "sequence_plan")},
    ),
    *mutants(
        "call/dropout.py",
        PATTERN,
        {
            "dropout: keeps what it should drop": ("return round(p * NUMBERS)", "return round((1 - p) * NUMBERS)"),
            "dropout: the threshold itself is dropped": ("halves >= threshold(p)", "halves > threshold(p)"),
            "dropout: not the expectation of what is kept": ("return NUMBERS / kept if", "return 1 / (1 - p) if"),
            "dropout: nine rounds": ("ROUNDS = 10", "ROUNDS = 9"),
            "dropout: one key for all rounds": ("key + index * WEYL[which]", "key + WEYL[which]"),
            "dropout: tiles that begin between groups": (
                "(side.start // 16 * 16 for side",
                "(side.start // 8 * 8 for side",
            ),
            "dropout: halves of a word exchanged": (
                "torch.stack([word & 0xFFFF, word >> 16])",
                "torch.stack([word >> 16, word & 0xFFFF])",
            ),
            "dropout: one pattern for all heads": (
                "(b[:, None] * place.heads + (place.head + h)).flatten()",
                "(b[:, None] * place.heads + (place.head + 0 * h)).flatten()",
            ),
        },
    ),
]
