"""Forward passes: online softmax, masks on tiles, positions, query heads and their keys, sinks and lse.

The kernels of TileLang run on the CPU by tileattn.testing.emulate, those of Triton in its interpreter.
"""

from __future__ import annotations

from ..mutant import Mutant, mutants

LOOP = (
    "kernels/torch/test_backend.py::test_the_loop_is_right_where_the_fused_attention_would_run",
    "runtime/test_autograd.py::test_random_compositions",
    "test_conformance.py::test_random_compositions",
)
REFERENCE = ("reference/test_forward.py::test_lengths", "reference/test_forward.py::test_tiles_of_any_size")
EMULATED = ("kernels/tilelang/forward/test_emulated.py",)
INTERPRETED = (
    "variant/test_tensor_gradients.py",
    "kernels/triton/test_backend.py::test_gradients_that_are_asked_for",
    "kernels/triton/test_backend.py::test_rows_without_keys",
    "kernels/triton/test_backend.py::test_in_small_tiles[window]",
)
TORCH, TILELANG, TRITON = (f"kernels/{name}" for name in ("torch", "tilelang", "triton"))
SOFTMAX = f"{TILELANG}/tile/softmax.py"

MUTANTS: list[Mutant] = [
    *mutants(
        f"{TORCH}/mask.py",
        LOOP,
        {
            "torch: full ranges end nowhere": (
                "keys.start < self.full_lo or keys.stop > self.full_hi",
                "keys.start < self.full_lo",
            ),
            "torch: full ranges begin nowhere": (
                "keys.start < self.full_lo or keys.stop > self.full_hi",
                "keys.stop > self.full_hi",
            ),
            "torch: positions aligned top-left": (
                "q = self.arange(rows) + (self.seqlen_k - self.seqlen_q)",
                "q = self.arange(rows)",
            ),
        },
    ),
    *mutants(
        f"{TORCH}/mask.py",
        ("variant/test_masks_by_head.py::test_heads_with_other_ranges",),
        {
            "torch: what one head sees as a whole": (
                "bounds(seen_by_all[0]).amax(1)",
                "bounds(seen_by_all[0]).amin(1)",
            ),
            "torch: keys that all heads see": ("bounds(seen[0]).amin(1)", "bounds(seen[0]).amax(1)"),
        },
    ),
    *mutants(
        f"{TORCH}/softmax.py",
        LOOP,
        {
            "torch: the sum is not rescaled": ("in_x * x.l + in_y * y.l", "x.l + in_y * y.l"),
            "torch: the output is not rescaled": ("in_x[..., None] * x.o + in_y", "x.o + in_y"),
            "torch: the other output is not rescaled": ("+ in_y[..., None] * y.o", "+ y.o"),
            "torch: lse in powers of two": ("m + torch.log(l)", "m + torch.log2(l)"),
            "torch: a sink's place is not in lse": (
                "[..., None]).to(o.dtype), with_sink",
                "[..., None]).to(o.dtype), lse",
            ),
        },
    ),
    *mutants(
        f"{TORCH}/loop.py",
        LOOP,
        {
            "torch: query heads in turn": (
                ".unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)",
                ".unflatten(2, (-1, kv_heads)).permute(0, 3, 2, 1, 4)",
            ),
        },
    ),
    *mutants(
        f"{TORCH}/loop.py",
        ("api/test_dropout.py::test_it_is_the_pattern_of_the_seed",),
        {
            "torch: kept weights stay as they are": ("(o * matrix.weight_of_kept)", "o"),
            "torch: the sum without what is dropped": (
                "p = p.masked_fill(matrix.dropped(rows, keys), 0.0)",
                "p = p.masked_fill(matrix.dropped(rows, keys), 0.0); l = p.sum(-1)",
            ),
        },
    ),
    *mutants(
        f"{TORCH}/fused.py",
        (
            "kernels/torch/test_backend.py::test_plain_attention_is_one_fused_call_without_a_mask",
            "testing/test_numerics.py::test_positions_are_aligned_bottom_right",
            "runtime/test_autograd.py::test_the_loop_is_right_where_pytorchs_fused_backward_runs",
            "kernels/torch/test_backend.py::test_the_loop_is_right_where_the_fused_attention_would_run",
            "runtime/test_autograd.py::test_random_compositions",
            "test_conformance.py::test_random_compositions",
        ),
        {
            "torch: causal in one call for any lengths": (
                "is Causal and matrix.seqlen_q == matrix.seqlen_k",
                "is Causal",
            ),
        },
    ),
    *mutants(
        "reference/tiled.py",
        REFERENCE,
        {
            "reference: full ranges end nowhere": (
                "keys.start < full_lo or keys.stop > full_hi",
                "keys.start < full_lo",
            ),
        },
    ),
    *mutants(
        "reference/tiled.py",
        ("test_conformance.py::test_random_compositions",),
        {
            "reference: what one head sees as a whole": ('extreme(full_hi, "min")', 'extreme(full_hi, "max")'),
        },
    ),
    *mutants(
        SOFTMAX,
        EMULATED,
        {
            "tilelang: the sum is not rescaled": ("l[i] = l[i] * alpha[i] + row_sum[i]", "l[i] = l[i] + row_sum[i]"),
            "tilelang: rows without keys have a maximum": ("0.0, m[i] * c)", "m[i] * c, m[i] * c)"),
            "tilelang: lse in powers of two": ("(T.log2(l[i]) + base[i]) * LN2", "T.log2(l[i]) + base[i]"),
            "tilelang: the sum beside a sink": (
                "l[i] = l[i] * alpha[i] + T.exp2(_of_row(sink_log2, i) - base[i])",
                "l[i] = l[i] + T.exp2(_of_row(sink_log2, i) - base[i])",
            ),
        },
    ),
    *mutants(
        f"{TILELANG}/forward/hopper/plan.py",
        ("kernels/tilelang/forward/test_lowering.py::test_tiles_of_keys_begin_where_a_pattern_or_a_copy_can",),
        {
            "tilelang: tiles begin within a group of dropout's pattern": (
                "self.copied is not None or call.dropout",
                "self.copied is not None",
            ),
        },
    ),
    *mutants(
        f"{TILELANG}/tile/key_words.py",
        ("kernels/tilelang/tile/test_key_range.py",),
        {
            "tilelang: a row that may see a range sees all of it": (
                "((lo == certain_lo) & (hi == certain_hi)) | (hi <= lo)",
                "(lo == lo) | (hi <= lo)",
            ),
        },
    ),
    *mutants(
        f"{TILELANG}/forward/generic.py",
        EMULATED,
        {
            "tilelang: the output is not rescaled": (
                "        softmax.rescale(w.acc_o, w.alpha, block_M, plan.head_dim_v)\n",
                "",
            ),
            "tilelang: a sink in natural units": ("sink * softmax.LOG2E", "sink"),
        },
    ),
    *mutants(
        f"{TILELANG}/tile/mask.py",
        EMULATED,
        {
            "tilelang: keys beyond the last": (
                "return allowed if self.bounded else within & allowed",
                "return allowed",
            ),
        },
    ),
    *mutants(
        f"{TILELANG}/forward/generic.py",
        EMULATED,
        {
            "tilelang: full keys are not clamped": (
                "(k_lo < keys.full_lo) | (k_lo + block_N > keys.full_hi)",
                "k_lo < keys.full_lo",
            ),
            "tilelang: query heads in turn": (
                "T.truncdiv(h, arg.heads_per_kv_head)",
                "T.truncmod(h, arg.heads_per_kv_head)",
            ),
            "tilelang: positions aligned top-left": (
                "q_lo = row + seqlen_k - seqlen_q",
                "q_lo = row + 0 * (seqlen_k - seqlen_q)",
            ),
        },
    ),
    *mutants(
        f"{TRITON}/forward/kernel.py",
        INTERPRETED,
        {
            "triton: the output is not rescaled": ("acc = acc * alpha[:, None]\n        # V:", "# V:"),
            "triton: query heads in turn": ("h_kv = h // heads_per_kv_head", "h_kv = h % heads_per_kv_head"),
        },
    ),
    *mutants(
        f"{TRITON}/plan.py",
        ("kernels/triton/test_backend.py::test_large_scores_in_float32",),
        {"triton: float32 in units of log2(e)": ('self.precision in ("bf16x6", "ieee")', "False")},
    ),
    *mutants(
        f"{TRITON}/tile/softmax.py",
        INTERPRETED,
        {
            "triton: the sum is not rescaled": ("l = l * alpha + tl.sum(p, 1)", "l = l + tl.sum(p, 1)"),
            "triton: rows without keys have a maximum": ('float("inf"), 0.0, m)', 'float("inf"), m, m)'),
            "triton: lse in powers of two": ("(m + tl.log2(l)) * LN2", "(m + tl.log2(l))"),
            "triton: the sum beside a sink": (
                "l = l * alpha + power(logit - m_new, natural)",
                "l = l + power(logit - m_new, natural)",
            ),
        },
    ),
    *mutants(
        f"{TRITON}/tile/tiles.py",
        INTERPRETED,
        {
            "triton: keys beyond the last": ("within = within & plan.allows(", "within = plan.allows("),
            "triton: full tiles one too many": (
                "full_end = tl.maximum(full_hi, 0) // block * block",
                "full_end = (tl.maximum(full_hi, 0) + block - 1) // block * block",
            ),
            "triton: full tiles one too early": ("(full_lo + block - 1) // block * block", "full_lo // block * block"),
        },
    ),
]
