"""Signatures, arguments and errors of tileattn.compat.flex_attention, and torch.compile."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from tests import fresh_process
from tests.tools.flex_oracle import inputs
from tileattn.compat import flex_attention as flex
from tileattn.compat.flex_attention import AuxRequest, create_block_mask, flex_attention


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def test_names() -> None:
    assert flex.__all__ == torch_flex.__all__
    for name in ("BlockMask", "AuxRequest", "AuxOutput", "FlexKernelOptions", "create_mask"):
        assert getattr(flex, name) is getattr(torch_flex, name)


@pytest.mark.parametrize("name", ["flex_attention", "create_block_mask", "create_mask"])
def test_signatures(name: str) -> None:
    """Names, kinds, order and defaults are those of the installed PyTorch."""
    mine, theirs = (inspect.signature(getattr(module, name)).parameters for module in (flex, torch_flex))
    assert list(mine) == list(theirs)
    for parameter in theirs:
        assert mine[parameter].kind == theirs[parameter].kind
        assert mine[parameter].default == theirs[parameter].default


# The signatures of PyTorch 2.11, as its source has them.
OF_2_11 = {
    flex_attention: "query key value score_mod block_mask scale enable_gqa return_lse kernel_options return_aux",
    create_block_mask: "mask_mod B H Q_LEN KV_LEN device BLOCK_SIZE _compile",
}


@pytest.mark.parametrize("function", OF_2_11, ids=lambda function: function.__name__)
def test_the_arguments_of_2_11_come_first(function: Any) -> None:
    arguments = OF_2_11[function].split()
    assert (
        list(inspect.getfullargspec(inspect.unwrap(function)).args)[: len(arguments)]
        + ["return_aux"] * (function is flex_attention)
        == arguments
    )


def test_import_tileattn_does_not_import_it() -> None:
    fresh_process.run(
        "import sys, tileattn\n"
        "assert not any(name.startswith('tileattn.compat') for name in sys.modules)\n"
        "import tileattn.compat.flex_attention\n"
        "assert not {'torch._dynamo', 'triton', 'tilelang'} & set(sys.modules)\n"
    )


# --- What is returned ---


def test_what_is_returned() -> None:
    q, k, v = inputs((20, 20))
    out = flex_attention(q, k, v)
    assert isinstance(out, torch.Tensor)
    with_lse, lse = flex_attention(q, k, v, return_lse=True)
    assert lse.shape == (2, 4, 20)
    assert lse.dtype == torch.float64
    for lse_too in (True, False):
        same, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=lse_too))
        assert isinstance(aux, torch_flex.AuxOutput)
        assert aux.max_scores is None
        assert (aux.lse is not None) == lse_too
        assert torch.equal(out, same)
    assert torch.equal(out, with_lse)
    assert torch.equal(aux.lse, lse) if aux.lse is not None else True


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype: torch.dtype) -> None:
    q, k, v = (x.detach().to(dtype) for x in inputs((20, 20)))
    out, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True))
    assert out.dtype == dtype
    assert aux.lse.dtype == torch.float32


def test_strides_and_autocast() -> None:
    q, k, v = (x.detach().float() for x in inputs((20, 20)))
    strided = (x.mT.contiguous().mT for x in (q, k, v))
    torch.testing.assert_close(flex_attention(*strided), flex_attention(q, k, v))
    with torch.autocast("cpu", torch.bfloat16):
        assert flex_attention(q, k, v).dtype == torch.bfloat16


# --- Errors ---

Q, K, V = (x.detach() for x in inputs((20, 30)))
FEW = K[:, :2]


def mask(*lengths: int, planes: tuple[Any, Any] = (None, None)) -> Any:
    return create_block_mask(causal, *planes, *lengths, device="cpu")


ERRORS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no tensor": ({"query": 1}, TypeError, "query must be a torch.Tensor, got int"),
    "three dimensions": ({"key": K[0]}, ValueError, r"key must have 4 dimensions, .* got shape \(4, 30, 8\)"),
    "integers": ({"value": V.int()}, TypeError, "value must be float16, .* got torch.int32"),
    "dtypes": ({"key": K.float()}, ValueError, "key must have query's dtype .* got torch.float32"),
    "head dims": ({"key": K[..., :4]}, ValueError, "key must have query's E = 8"),
    "lengths of key and value": ({"value": V[:, :, :9]}, ValueError, "value must have key's"),
    "heads": ({"key": FEW, "value": FEW}, ValueError, "Hq=4 and Hkv=2; try enable_gqa=True"),
    "groups": ({"key": K[:, :3], "value": K[:, :3], "enable_gqa": True}, ValueError, "multiple of key's, got Hq=4"),
    "batch": ({"key": K[:1], "value": V[:1]}, ValueError, "key must have query's batch size 2, .* got 1 and .* None"),
    "batch of the mask": ({"key": K[:1], "value": V[:1], "block_mask": mask(20, 30)}, ValueError, "got 1 and .* for 1"),
    "score_mod": ({"score_mod": causal}, TypeError, "score_mod must be a function score_mod.score, b, h, q_idx, kv"),
    "a list of mods": ({"score_mod": [causal]}, TypeError, "score_mod must be a function .*, got list"),
    "a function as mask": ({"block_mask": causal}, TypeError, "must be a BlockMask or None, got function; a mask func"),
    "a tensor as mask": ({"block_mask": torch.ones(20, 30)}, TypeError, "must be a BlockMask or None, got Tensor"),
    "a smaller mask": ({"block_mask": mask(20, 29)}, ValueError, "q_len=20 and kv_len=30. Create one for these"),
    "a larger mask": ({"block_mask": mask(21, 30)}, ValueError, "or crop it by block_mask._adjust"),
    "planes": ({"block_mask": mask(20, 30, planes=(3, 1))}, ValueError, "block_mask must have B = 1 or 2"),
    "heads of the mask": ({"block_mask": mask(20, 30, planes=(1, 2))}, ValueError, "block_mask must have H = 1 or 4"),
    "scale": ({"scale": "1"}, TypeError, "scale must be a finite number"),
    "enable_gqa": ({"enable_gqa": "no"}, TypeError, "enable_gqa must be True or False"),
    "both": ({"return_lse": True, "return_aux": AuxRequest(lse=True)}, ValueError, "exclude each other"),
    "aux": ({"return_aux": True}, TypeError, "return_aux must be an AuxRequest or None, got bool"),
    "max_scores": ({"return_aux": AuxRequest(max_scores=True)}, NotImplementedError, "max_scores is not computed"),
    "options": ({"kernel_options": 3}, TypeError, "kernel_options must be a dict or None, got int"),
    "an option": ({"kernel_options": {"BLOCKM": 64}}, ValueError, "no option is called 'BLOCKM'"),
    "BACKEND": ({"kernel_options": {"BACKEND": "FLASH"}}, NotImplementedError, "BACKEND='FLASH' names a kernel of"),
    "branch": ({"score_mod": lambda s, b, h, q, k: s if q > k else -s}, TypeError, "cannot branch"),
    "a row of a table": (
        {"score_mod": lambda s, b, h, q, k: s + K[b, h, q].sum()},
        TypeError,
        "must be indexed with 4",
    ),
    "no such argument": ({"dropout_p": 0.1}, TypeError, "dropout_p"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    changed, error, match = ERRORS[name]
    with pytest.raises(error, match=match):
        flex_attention(**{"query": Q, "key": K, "value": V, **changed})


@pytest.mark.parametrize(
    ("changed", "error", "match"),
    [
        ({"mask_mod": lambda score, b, h, q, k: q}, TypeError, "mask_mod must be a function mask_mod.b, h, q_idx, kv"),
        ({"mask_mod": torch.ones(3, 3)}, TypeError, "mask_mod must be a function .*, got Tensor"),
        ({"B": 1.5}, TypeError, "B must be an int or None, got 1.5"),
        ({"Q_LEN": None}, TypeError, "Q_LEN must be an int, got None"),
        ({"KV_LEN": -1}, ValueError, "KV_LEN must be at least 0, got -1"),
        ({"BLOCK_SIZE": 0}, ValueError, "BLOCK_SIZE must be a positive int"),
        ({"BLOCK_SIZE": (1, 2, 3)}, ValueError, "BLOCK_SIZE must be a positive int or two"),
    ],
)
def test_errors_of_create_block_mask(changed: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        create_block_mask(**{"mask_mod": causal, "B": 1, "H": 1, "Q_LEN": 9, "KV_LEN": 9, **changed})


def test_a_part_that_is_not_callable() -> None:
    for join in (flex.and_masks, flex.or_masks):
        with pytest.raises(RuntimeError, match="callable mask_mods, got int"):
            join(causal, 3)  # type: ignore[arg-type]


def test_too_few_rows_of_blocks() -> None:
    one = torch.ones(1, 1, 1, dtype=torch.int32)
    blocks = torch_flex.BlockMask.from_kv_blocks(one, one[..., None] * 0, BLOCK_SIZE=16, seq_lengths=(20, 30))
    with pytest.raises(ValueError, match="1 rows of blocks of 16 queries, which do not cover 20 queries"):
        flex_attention(Q, K, V, block_mask=blocks)


def test_hints_have_no_effect() -> None:
    hints: Any = {"BLOCK_M": 64, "fwd_num_stages": 2, "bwd_BLOCK_M1": 32, "PRESCALE_QK": True, "BACKEND": "AUTO"}
    assert torch.equal(flex_attention(Q, K, V, kernel_options=hints), flex_attention(Q, K, V))


def test_options_that_this_pytorch_lacks() -> None:
    """PyTorch 2.11 has no separate_full_blocks; 2.13 has."""
    if "separate_full_blocks" in inspect.signature(torch_flex.create_block_mask).parameters:
        made = create_block_mask(causal, 1, 1, 64, 64, "cpu", 16, separate_full_blocks=False)
        assert made.full_kv_num_blocks is None
    else:
        with pytest.raises(ValueError, match="has no option separate_full_blocks"):
            create_block_mask(causal, 1, 1, 64, 64, "cpu", 16, separate_full_blocks=False)


# --- torch.compile ---

IDS = torch.arange(64) // 20


def document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return IDS[q_idx] == IDS[kv_idx]


@pytest.mark.slow(reason="2 s each, in Dynamo; with the mask inside it stays")
@pytest.mark.parametrize("create", [create_block_mask, torch_flex.create_block_mask], ids=["lazy", "blocks"])
def test_compiled(create: Any) -> None:
    """The function itself, one graph, gradients included; PyTorch's and_masks is traced too."""
    slopes = torch.rand(4, dtype=torch.float64, requires_grad=True)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * (q_idx - kv_idx)

    leaves = [*inputs((64, 64), (4, 2)), slopes]
    parts = causal, document, torch_flex.noop_mask, lambda b, h, q_idx, kv_idx: IDS[h.new_zeros(h.shape)] <= kv_idx
    block_mask = create(torch_flex.and_masks(*parts), None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    compiled = torch.compile(flex_attention, fullgraph=True, backend="aot_eager")
    answers = [f(*leaves[:3], mod, block_mask, enable_gqa=True) for f in (compiled, flex_attention)]
    torch.testing.assert_close(*answers)
    torch.testing.assert_close(*[torch.autograd.grad(out.square().sum(), leaves) for out in answers])


def test_compiled_with_the_mask_inside() -> None:
    def attend(q: Any, k: Any, v: Any) -> Any:
        block_mask = create_block_mask(causal, None, None, q.shape[2], k.shape[2], device="cpu")
        return flex_attention(q, k, v, block_mask=block_mask)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (20, 12, 17):
        part = Q[:, :, :length], K, V
        torch.testing.assert_close(compiled(*part), attend(*part))
