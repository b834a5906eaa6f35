"""Backward passes, derivatives of score modifications, and gradients of the tensors that these read."""

from __future__ import annotations

from ..mutant import Mutant, mutants

TORCH = "kernels/torch/backward.py"
LOOP = ("runtime/test_autograd.py::test_random_compositions", "runtime/test_autograd.py::test_gradcheck")
DROPOUT = ("api/test_dropout.py::test_it_is_the_pattern_of_the_seed",)
TRITON = "kernels/triton/backward/kernels.py"
INTERPRETED = (
    "kernels/triton/test_backend.py::test_gradients_that_are_asked_for",
    "variant/test_tensor_gradients.py",
    "kernels/triton/test_backend.py::test_in_small_tiles[window]",
)
OF_TENSORS = ("variant/test_tensor_gradients.py",)
TILELANG = "kernels/tilelang/backward"
EMULATED = ("kernels/tilelang/packed/test_backward_emulated.py::test_gradients",)
PATTERN = ("kernels/tilelang/tile/test_dropout_emulated.py::test_forward",)
WORDS = (
    "kernels/tilelang/backward/hopper/test_query_words.py::test_one_range_of_queries_sees_a_key",
    "kernels/tilelang/backward/hopper/test_query_words.py::test_keys_that_no_single_range_sees",
    "kernels/tilelang/backward/hopper/test_query_words.py::test_what_is_told_by_expressions_alone",
)
RULES = ("variant/test_derivative.py",)

MUTANTS: list[Mutant] = [
    *mutants(
        TORCH,
        LOOP,
        {
            "torch: dlse with the other sign": ("else delta - dlse", "else delta + dlse"),
            "torch: dsink with the other sign": ("return -(p * delta).sum", "return (p * delta).sum"),
            "torch: dq without the scale": ("self.unfolded(dq.mul_(scale),", "self.unfolded(dq,"),
            "torch: dk without the scale": (
                "self.dk[:, keys].baddbmm_(raw.mT, q)",
                "self.dk[:, keys].baddbmm_(raw.mT, q, alpha=1 / scale if scale else 1)",
            ),
            "torch: ds without delta": ("ds_by_head.sub_(delta).mul_(p_by_head)", "ds_by_head.mul_(p_by_head)"),
            "torch: probabilities where the mask hides": ("p_by_head.masked_fill_(forbidden, 0.0)", "pass"),
            "torch: dv of the last keys alone": ("self.dv[:, keys].baddbmm_(p.mT, do)", "self.dv[:, keys] = p.mT @ do"),
            "torch: query heads in turn, backward": (
                ".unflatten(2, (self.kv_heads, -1)).permute(0, 2, 3, 1, 4)",
                ".unflatten(2, (-1, self.kv_heads)).permute(0, 3, 2, 1, 4)",
            ),
        },
    ),
    *mutants(
        TORCH,
        ("runtime/test_autograd.py::test_a_modification_may_be_nan_where_the_mask_forbids",),
        {
            "torch: slopes where the mask hides": (
                "through if forbidden is None else through.masked_fill(forbidden, 0.0)",
                "through",
            ),
        },
    ),
    *mutants(
        f"{TILELANG}/hopper/query_words.py",
        WORDS,
        {
            "tilelang, backward: a range that may see a key sees it": (
                "((lo == certain_lo) & (hi == certain_hi)) | (hi <= lo)",
                "(lo == lo) | (hi <= lo)",
            ),
            "tilelang, backward: queries of keys behind the last": (
                "hi = T.if_then_else(k < visible.seqlen_k, hi, 0)",
                "hi = T.if_then_else(k <= visible.seqlen_k, hi, 0)",
            ),
        },
    ),
    *mutants(
        f"{TILELANG}/query_range.py",
        WORDS,
        {
            "tilelang, backward: ranges that differ by key are exact": (
                "of_one_key(traced.q_range) == of_one_key(traced.full_q_range)",
                "len(of_one_key(traced.q_range)) == len(of_one_key(traced.full_q_range))",
            ),
        },
    ),
    *mutants(
        TORCH,
        DROPOUT,
        {
            "torch: ds of what is dropped": ("ds_by_head.masked_fill_(dropped, 0.0)", "pass"),
            "torch: dv of what is dropped": ("p_by_head.masked_fill_(dropped, 0.0)", "pass"),
            "torch: kept weights stay as they are, backward": (
                "self.folded(do) * matrix.weight_of_kept",
                "self.folded(do)",
            ),
        },
    ),
    *mutants(
        "kernels/torch/score_gradient.py",
        OF_TENSORS,
        {
            "torch: slopes of hidden scores in a tensor's gradient": (
                "gradient = gradient.masked_fill(forbidden, 0.0)",
                "pass",
            ),
            "torch: an element that is read twice counts once": (
                "gradient.to(self.total.dtype), accumulate=True",
                "gradient.to(self.total.dtype)",
            ),
        },
    ),
    *mutants(
        TORCH,
        ("runtime/test_autograd.py::test_the_loop_is_right_where_pytorchs_fused_backward_runs",),
        {
            "torch: one call for any lengths, backward": ("elif dlse is None and fused", "elif fused"),
        },
    ),
    *mutants(
        "reference/backward.py",
        ("reference/test_backward.py::test_gradients_are_those_of_autograd",),
        {
            "reference: dlse with the other sign": ("delta - dlse", "delta + dlse"),
        },
    ),
    *mutants(
        "kernels/sink.py",
        ("kernels/test_sink.py",),
        {"dsink with the other sign": ("return -(p * delta).sum", "return (p * delta).sum")},
    ),
    *mutants(
        "reference/standard.py",
        ("fuzz/test_fuzz.py::test_gradients_of_equal_values_are_right",),
        {"reference: a gradient through the row maximum": ("logits.detach().amax(", "logits.amax(")},
    ),
    *mutants(
        "kernels/triton/backward/operand_gradients.py",
        OF_TENSORS,
        {
            "triton: the first query position is dropped": (' + (first_position if axis == "q" else 0)', ""),
            "triton: an element that is read twice counts once": (
                "torch.where(within, part, 0.0), accumulate=True",
                "torch.where(within, part, 0.0)",
            ),
        },
    ),
    *mutants(
        TRITON,
        INTERPRETED,
        {
            "triton: dlse with the other sign": ("total -= load_rows(dlse", "total += load_rows(dlse"),
            "triton: dq without delta": (
                "p = probabilities(s * unit - lse2, plan.natural)\n        ds = p * (dp - delta)",
                "p = probabilities(s * unit - lse2, plan.natural)\n        ds = p * dp",
            ),
            "triton: dk without the scale": ("store_tile(dk, dk_sum * scale,", "store_tile(dk, dk_sum,"),
            "triton: dq without the scale": ("store_tile(dq, dq_sum * scale,", "store_tile(dq, dq_sum,"),
            "triton: query heads in turn, backward": (
                "h = h_kv * heads_per_kv_head + member",
                "h = h_kv + member * kv_heads",
            ),
            "triton: keys of query heads in turn": ("h_kv = h // heads_per_kv_head", "h_kv = h % heads_per_kv_head"),
        },
    ),
    *mutants(
        TRITON,
        ("kernels/triton/test_backend.py::test_rows_without_keys",),
        {
            "triton: rows without keys have probabilities": (
                'tl.where(values == -float("inf"), float("inf"), values * unit_of(1.0, natural))',
                "values * unit_of(1.0, natural)",
            ),
        },
    ),
    *mutants(
        TRITON,
        INTERPRETED,
        {
            "triton: slopes are left out of dk": (
                "k_positions, facts, plan)\n            ds = ds * plan.slope(",
                "k_positions, facts, plan)\n            _ = ds * plan.slope(",
            ),
        },
    ),
    *mutants(
        TRITON,
        OF_TENSORS,
        {
            "triton: gradients of hidden scores": (
                "gradient = tl.where(seen & within, ds",
                "gradient = tl.where(within, ds",
            ),
        },
    ),
    *mutants("kernels/triton/backward/launch.py", INTERPRETED, {}),
    *mutants(
        f"{TILELANG}/tile.py",
        EMULATED,
        {
            "tilelang: ds with delta's other sign": (
                "(acc_dp[i, j] - scores.of_query(delta, i, j))",
                "(acc_dp[i, j] + scores.of_query(delta, i, j))",
            ),
        },
    ),
    *mutants(
        f"{TILELANG}/prepare.py",
        ("kernels/tilelang/packed/test_backward_emulated.py::test_what_is_prepared_for_hopper",),
        {
            "tilelang: lse in natural units, backward": (
                "arg.lse[b, h, row + i] * softmax.LOG2E",
                "arg.lse[b, h, row + i]",
            ),
            "tilelang: dlse with the other sign": ("delta[i] -= arg.dlse", "delta[i] += arg.dlse"),
        },
    ),
    *mutants(
        f"{TILELANG}/tile.py",
        EMULATED,
        {
            "tilelang: hidden scores have probabilities": (
                "self.visible.sees(self.b, self.h, self.q_lo + q, self.k_lo + k)",
                "self.visible.sees(self.b, self.h, self.q_lo + q, 0 * self.k_lo + k)",
            ),
        },
    ),
    *mutants(
        f"{TILELANG}/launch.py",
        ("kernels/tilelang/packed/test_backward_emulated.py::test_rows_of_wrong_lengths_are_unused",),
        {
            "tilelang: dsink of rows of no sequence": (
                "delta if packed is None else delta.masked_fill",
                "delta if True else delta.masked_fill",
            ),
        },
    ),
    *mutants(
        f"{TILELANG}/operand_gradients.py",
        ("kernels/tilelang/backward/test_operand_gradients.py",),
        {
            "tilelang: the first query position is dropped": ('"q": first_position, "k": 0}', '"q": 0, "k": 0}'),
        },
    ),
    *mutants(
        f"{TILELANG}/operand_gradients.py",
        ("kernels/tilelang/backward/test_operand_gradients.py", "kernels/tilelang/packed/test_operand_gradients.py"),
        {
            "tilelang: gradients beyond the tensor": (
                "torch.where(within, parts, 0.0), accumulate",
                "parts, accumulate",
            ),
        },
    ),
    *mutants(
        f"{TILELANG}/operand_gradients.py",
        ("kernels/tilelang/backward/test_operand_gradients.py",),
        {
            "tilelang: windows begin at 0": ("slice(lo - offset, hi - offset)", "slice(0, hi - lo)"),
        },
    ),
    *mutants(
        f"{TILELANG}/slopes.py",
        ("kernels/tilelang/backward/test_operand_gradients.py",),
        {
            "tilelang: the derivative of another load": (
                "split(derivative(score, load)) for load in loads",
                "split(derivative(score, load)) for load in loads[::-1]",
            ),
        },
    ),
    *mutants(
        "kernels/tilelang/tile/dropout.py",
        PATTERN,
        {
            "tilelang: groups of dropout begin elsewhere": ("return i % 16 >= 8", "return i % 16 > 8"),
            "tilelang: keys of a tile in the wrong group": (
                "words[FIRST_KEYS] = _word(key // 2 + arg.first_key_group)",
                "words[FIRST_KEYS] = _word(key + arg.first_key_group)",
            ),
        },
    ),
    *mutants(
        "variant/derivative.py",
        RULES,
        {
            "derivative: tanh": ("_times(1.0 - z * z, dx)", "_times(1.0 - z, dx)"),
            "derivative: min of the larger": ('_extremum(apply("lt", x, y)', '_extremum(apply("gt", x, y)'),
            "derivative: quotients": ("_over(_minus(dx, _times(z, dy)), y)", "_over(_minus(dx, dy), y)"),
            "derivative: roots": ("_over(_times(0.5, dx), z)", "_over(_times(0.5, dx), x)"),
            "derivative: both branches exchanged": ("dc, dx, dy: _where(c, dx, dy)", "dc, dx, dy: _where(c, dy, dx)"),
            "derivative: cosine": ('_minus(0.0, _times(apply("sin", x), dx))', '_times(apply("sin", x), dx)'),
            "derivative: equal arguments of an extremum": ("_times(0.5, _plus(dx, dy))", "_plus(dx, dy)"),
            "derivative: the remainder's divisor": (
                '_times(apply("floordiv", x, y), dy)',
                '_times(apply("floordiv", y, x), dy)',
            ),
        },
    ),
    *mutants(
        "variant/scores.py",
        ("variant/test_scores.py",),
        {
            "alibi: grows on one side": ("score - slope * abs(q - k)", "score - slope * (q - k)"),
            "alibi: with the other sign": ("score - slope * abs(q - k)", "score + slope * abs(q - k)"),
            "softcap: not of the cap's size": ("self.cap * tanh(score / self.cap)", "tanh(score / self.cap)"),
        },
    ),
    *mutants(
        "variant/scores.py",
        OF_TENSORS,
        {
            "bias: read by positions": ("q - (keys - rows), k)", "q, k)"),
            "bias: one row for all is read by rows": (
                "load(self.tensor, b, h, q - (keys - rows), k)",
                "load(self.tensor, b, h, q - keys, k)",
            ),
        },
    ),
    *mutants(
        "kernels/tilelang/backward/launch.py",
        ("kernels/tilelang/backward/test_launch.py",),
        {
            "launch: the short way with lse's gradient": ("or call.dlse or program(", "or program("),
            "launch: the short way with a mask's tensors": (" or program(forward.variant).tensors", ""),
            "launch: the short way without the floats": (
                "*scalars, *operands.ints, *operands.floats)",
                "*scalars, *operands.ints)",
            ),
            "launch: the short way's expanded batches": (
                "if not (q.stride(0) and k.stride(0) and v.stride(0) and o.stride(0) and do.stride(0)):\n"
                "            q, k, v, o, do = map(one_batch, (q, k, v, o, do))\n"
                "        prepare(",
                "prepare(",
            ),
        },
    ),
    *mutants(
        "runtime/differentiable.py",
        ("runtime/test_prepared.py",),
        {
            "prepared: a gradient of any strides": ("o.stride(), do.stride()\n", "o.stride()\n"),
            "prepared: deterministic is seen once": (
                "needs, dlse, ops.is_deterministic(), sizes",
                "needs, dlse, sizes",
            ),
            "prepared: what hooks return is not asked for": (
                "q.stride(), k.stride(), v.stride(), o.stride()",
                "o.stride()",
            ),
        },
    ),
    *mutants(
        "variant/constants.py",
        ("runtime/test_prepared.py",),
        {
            "prepared: masks of one class are one": ("    return tuple(constants)", "    return (kind,)"),
            "prepared: masks of one size are one": ("constants: list[Any] = [kind]", "constants: list[Any] = []"),
        },
    ),
]
