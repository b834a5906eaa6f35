"""Dispatch, refusals (also those of calls that must run), alignment, and what a call's defaults are."""

from __future__ import annotations

from ..mutant import Mutant, mutants

SUPPORT = ("runtime/test_dispatch.py::test_a_backend_runs_what_it_must_and_nothing_else",)
CHOICE = ("runtime/test_dispatch.py::test_dispatch_chooses_the_first_that_must_run",)
ALIGNMENT = ("runtime/test_dispatch.py::test_alignment",)
NAMES = ("runtime/test_dispatch.py::test_options_behind_a_name_that_takes_none",)
TILELANG, TRITON, MMA = (f"kernels/{name}/backend.py" for name in ("tilelang", "triton", "mma"))
FLOAT64 = "if any(tensor.dtype == torch.float64 for tensor in program(call.variant).tensors):"

MUTANTS: list[Mutant] = [
    *mutants(
        "runtime/dispatch.py",
        CHOICE,
        {
            "dispatch: the last backend first": (
                "in BACKENDS if backend is None else",
                "in BACKENDS[::-1] if backend is None else",
            ),
            "dispatch: reservations do not count": ("= reservation(call) if backend is None else None", "= None"),
        },
    ),
    *mutants(
        "runtime/dispatch.py",
        NAMES,
        {
            "dispatch: any options behind a name": (
                "if backend is None or (colon and backend.configured is None):",
                "if backend is None:",
            ),
        },
    ),
    *mutants(
        "runtime/dispatch.py",
        ("api/test_attention.py::test_a_named_backend_that_refuses_says_why",),
        {
            "dispatch: a named backend need not accept": (
                "reason = reason or refusal(call)",
                "reason = reason or (refusal(call) if backend is None else None)",
            ),
        },
    ),
    *mutants(
        TILELANG,
        SUPPORT,
        {
            "tilelang: runs float64 operands": (
                "if any(tensor.dtype == torch.float64 for tensor in program(call.variant).tensors):",
                "if False:",
            ),
            "tilelang: refuses all operands": (
                "if any(tensor.dtype == torch.float64 for tensor in program(call.variant).tensors):",
                "if program(call.variant).tensors:",
            ),
            "tilelang: any head dim": ("if size % step or not", "if not"),
            "tilelang: head dims from 32 on": (
                "MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256",
                "MIN_HEAD_DIM, MAX_HEAD_DIM = 32, 256",
            ),
            "tilelang: head dims up to 128": (
                "MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256",
                "MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 128",
            ),
            "tilelang: head dims in steps of 16": ("_refusal_head_dims(call, 8)", "_refusal_head_dims(call, 16)"),
            "tilelang: fp8 in steps of 32": (
                '_refusal_head_dims(call, 16, " in fp8")',
                '_refusal_head_dims(call, 32, " in fp8")',
            ),
            "tilelang: fp8 with gradients": ("if call.needs_grad:", "if False:"),
            "tilelang: fp8 unaligned": ("if not call.aligned:", "if False:"),
            "tilelang: fp8 on any architecture": ('if call.arch != "sm_90a":', "if False:"),
            "tilelang: packed calls on AMD": (
                'if call.arch.startswith("gfx"):\n        return f"packed',
                'if False:\n        return f"packed',
            ),
            "tilelang: packed calls on Hopper alone": (
                'if call.arch.startswith("gfx"):\n        return f"packed',
                'if call.arch != "sm_90a":\n        return f"packed',
            ),
            "tilelang: no bfloat16": ("not in (torch.float16, torch.bfloat16, FP8)", "not in (torch.float16, FP8)"),
        },
    ),
    *mutants(
        TRITON,
        SUPPORT,
        {
            "triton: dropout": ("if call.dropout:", "if False:"),
            "triton: head dims up to 128": ("MAX_HEAD_DIM = 256", "MAX_HEAD_DIM = 128"),
            "triton: packed calls": ("if call.packed:", "if False:"),
            "triton: no gradients in float32": (
                "    if call.packed:",
                '    if call.needs_grad and call.dtype == torch.float32:\n        return "no"\n    if call.packed:',
            ),
        },
    ),
    *mutants(
        MMA,
        SUPPORT,
        {
            "mma: gradients": ("if call.needs_grad:", "if False:"),
            "mma: rows that are not aligned": ("if not call.aligned:", "if False:"),
            "mma: any mask": ('if call.variant not in ("", CAUSAL):', "if False:"),
            "mma: head dims that differ": ("if call.head_dim != call.head_dim_v:", "if False:"),
            "mma: no more than 99 KiB anywhere": (
                'SHARED_KIB.get(int(arch[3:].rstrip("af")), min(SHARED_KIB.values()))',
                "min(SHARED_KIB.values())",
            ),
        },
    ),
    *mutants(
        "kernels/torch/backend.py",
        SUPPORT,
        {
            "torch: fp8 with gradients": ("if call.dtype == FP8 and call.needs_grad:", "if False:"),
        },
    ),
    *mutants(
        "call/facts.py",
        ALIGNMENT,
        {
            "alignment: heads that repeat": ("if seqlen == 0 or heads == 0 or", "if seqlen == 0 or"),
            "alignment: any address": (" or tensor.data_ptr() % 16:", ":"),
            "alignment: any step of the batch": ("not (batch % step or seqlen % step", "not (seqlen % step"),
            "alignment: any step of the heads": (" or heads % step)", ")"),
            "alignment: 8 bytes": ("step = 16 // tensor", "step = 8 // tensor"),
        },
    ),
    *mutants(
        "runtime/run.py",
        ("api/test_attention.py::test_scale_is_by_default_that_of_the_head_dim",),
        {
            "scale: of the head dim, without the root": ("1.0 / math.sqrt(q.shape[3])", "1.0 / q.shape[3]"),
        },
    ),
]
