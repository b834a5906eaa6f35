"""Few queries: which calls the decode phase runs, packed keys, and the steps of transformers' caches."""

from __future__ import annotations

from ..mutant import Mutant, mutants

ROUTING = ("runtime/test_few_queries.py",)
STEP = ("compat/transformers/test_step.py",)

MUTANTS: list[Mutant] = [
    *mutants(
        "runtime/few_queries.py",
        ROUTING,
        {
            "few queries: gradients too": ("if call.needs_grad or call.dropout", "if call.dropout"),
            "few queries: dropout too": ("if call.needs_grad or call.dropout", "if call.needs_grad"),
            "few queries: any number of keys": ("or not LEAST_KEYS <= seqlen_k", "or not 1 <= seqlen_k"),
            "few queries: groups of any size": (" and seqlen_q * (heads // kv_heads) <= MOST_ROWS", ""),
            "few queries: keys of a stride of 0": ("if 0 in (k.stride(0), v.stride(0)):", "if False:"),
        },
    ),
    *mutants(
        "runtime/shared_calls.py",
        ("compat/transformers/test_layers.py",),
        {
            "layers: a plan of another stream": ("if self.stream != stream:", "if self.stream is None:"),
            "layers: a launch in a graph": (
                "if self.make_plan is None or (q.is_cuda and torch.cuda.is_current_stream_capturing()):",
                "if self.make_plan is None:",
            ),
        },
    ),
    *mutants(
        "api/shared_plans.py",
        ("nn/test_cache.py",),
        {"plans of a step: of another stream": ("key = (captured, stream, kind,", "key = (captured, kind,")},
    ),
    *mutants(
        "kernels/torch/decode/sequences.py",
        ROUTING,
        {
            "few queries: the first sequence's bias": (
                "Bias(mod.tensor[sequence.number : sequence.number + 1])",
                "Bias(mod.tensor[:1])",
            )
        },
    ),
    *mutants(
        "kernels/tilelang/decode/packed_keys.py",
        ("kernels/tilelang/decode/test_packed_keys.py",),
        {
            "packed keys: wrong lengths are used": ("wrong = 1", "wrong = 0"),
            "packed keys: one row behind the tensor": ("(end > total)", "(end > total + 1)"),
            "packed keys: keys begin where queries do": (
                "arg.found[KEYS_START, b] = T.if_then_else(wrong != 0, 0, arg.k[b])",
                "arg.found[KEYS_START, b] = T.if_then_else(wrong != 0, 0, arg.q[b])",
            ),
        },
    ),
    *mutants(
        "compat/transformers/step.py",
        STEP,
        {
            "step: a window that is one key longer": ("SlidingWindow(left, 0)", "SlidingWindow(left + 1, 0)"),
            "step: a window without its padding": ("else window & mask.padding", "else window"),
            "step: under autocast": (" and not torch._C._is_any_autocast_enabled()", ""),
        },
    ),
    *mutants(
        "compat/transformers/mask.py",
        STEP,
        {
            "step: one slot too many": (
                "(shift + kv_length).to(torch.int32)",
                "(shift + kv_length + 1).to(torch.int32)",
            ),
        },
    ),
    *mutants(
        "compat/transformers/mask.py",
        ("compat/transformers/test_masks.py::test_known_masks_are_no_tensors",),
        {"mask: what hides slots is left out": ("kv_length + int(shift)", "0")},
    ),
    *mutants(
        "compat/transformers/blocks.py",
        ("compat/transformers/test_continuous_batching.py",),
        {
            "blocks: the page table of the step before": (
                "found.read_index is read_index and found.cu_seqlens_k is cu_seqlens_k",
                "found.table is not None",
            ),
            "blocks: the next block": ("// cache.block_size).to", "// cache.block_size + 1).to"),
        },
    ),
]
