"""The backends of vLLM and SGLang: slots, windows, and what the layers of a step share."""

from __future__ import annotations

from ..mutant import Mutant, mutants

TESTS = ("compat/engines/test_engines.py",)

MUTANTS: list[Mutant] = [
    *mutants(
        "compat/vllm/backend.py",
        TESTS,
        {
            "vllm: a window has one key more": (
                "None if sliding_window is None else sliding_window - 1",
                "None if sliding_window is None else sliding_window",
            ),
            "vllm: padding is written": ("(slots % block_size + 1) * (slots >= 0)", "slots % block_size + 1"),
            "vllm: drafts as single queries": ("common.max_query_len == 1 and", "common.max_query_len <= 2 and"),
            "vllm: a shared cache is written": (
                "self.kv_sharing_target_layer_name is None and key is not None",
                "key is not None",
            ),
        },
    ),
    *mutants(
        "compat/sglang/backend.py",
        TESTS,
        {
            "sglang: a window of one key is none": ("layer.sliding_window_size >= 0", "layer.sliding_window_size > 0"),
            "sglang: no cap": ("layer.logit_cap or None", "None"),
            "sglang: every slot is a page": (":: self.page_size]", ":: 1]"),
        },
    ),
    *mutants(
        "compat/engine_step.py",
        TESTS,
        {
            "engines: one plan for all windows": ("return self.left, self.soft_cap, ", "return self.soft_cap, "),
            "engines: ALiBi's sign": ("ALiBi(self.slopes)", "ALiBi(-self.slopes)"),
        },
    ),
]
