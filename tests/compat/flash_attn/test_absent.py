"""Imports of flash-attn's modules and names: each works, or raises an error that names an alternative."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator

import pytest

from tileattn.compat import flash_attn as compat
from tileattn.compat.flash_attn._absent import NotProvided


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    """Another flash_attn, which a GPU machine may have, is out of the way meanwhile."""
    others = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "flash_attn"}
    compat.install()
    yield
    compat.uninstall()
    sys.modules.update(others)


# Statements of flash-attn's own tests, and of models and libraries that build on it.
IMPORTS = {
    "flash-attn's test_flash_attn.py": "from flash_attn.flash_attn_interface import _get_block_size_n",
    "flash-attn's test_rotary.py": "from flash_attn.layers.rotary import apply_rotary_emb, apply_rotary_emb_torch",
    "and in place": "from flash_attn.layers.rotary import apply_rotary_emb_qkv_, apply_rotary_emb_kv_",
    "flash-attn's layers/test_rotary.py": "from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb_func",
    "flash-attn's test_util.py": "from flash_attn.bert_padding import pad_input, unpad_input",
    "BERT": "from flash_attn.bert_padding import index_first_axis, index_first_axis_residual",
    "MosaicBERT": "from flash_attn.bert_padding import IndexFirstAxis, IndexPutFirstAxis, index_put_first_axis",
    "packed fine-tuning": "from flash_attn.bert_padding import unpad_input_for_concatenated_sequences",
    "Megatron-LM": "from flash_attn.layers.rotary import apply_rotary_emb as apply_rotary_emb_flash",
    "ModernBERT, vLLM": "from flash_attn.ops.triton.rotary import apply_rotary",
    "Qwen": "import flash_attn.layers.rotary; flash_attn.layers.rotary.apply_rotary_emb_func",
    "phi": "from flash_attn.modules.mha import FlashCrossAttention, FlashSelfAttention",
    "ring-flash-attn": "from flash_attn.flash_attn_interface import _flash_attn_forward, _flash_attn_backward",
    "and packed": "from flash_attn.flash_attn_interface import _flash_attn_varlen_forward, _flash_attn_varlen_backward",
    "MPT": "from flash_attn.modules.mha import get_alibi_slopes",
}


@pytest.mark.parametrize("user", IMPORTS)
def test_common_imports(user: str) -> None:
    exec(IMPORTS[user], {})


ABSENT = {
    "import flash_attn.ops.fused_dense": "flash_attn.ops.fused_dense is not in .* use torch.nn.Linear",
    "from flash_attn.ops.fused_dense import FusedDense": "torch.nn.Linear",
    "from flash_attn.ops import fused_dense": "flash_attn.ops.fused_dense is not in .* use torch.nn.Linear",
    "from flash_attn.ops.rms_norm import rms_norm": "torch.nn.RMSNorm",
    "from flash_attn.ops.layer_norm import dropout_add_layer_norm": "torch.nn.LayerNorm",
    "from flash_attn.ops.activations import swiglu": "torch.nn.functional",
    "from flash_attn.ops.triton.layer_norm import RMSNorm, layer_norm_fn": "torch.nn.RMSNorm",
    "from flash_attn.ops.triton.cross_entropy import cross_entropy_loss": "torch.nn.functional.cross_entropy",
    "from flash_attn.ops.triton.rotary import rotary_kernel": "use apply_rotary of the same module",
    "from flash_attn.losses.cross_entropy import CrossEntropyLoss": "torch.nn.CrossEntropyLoss",
    "from flash_attn.layers.patch_embed import PatchEmbed": "torch.nn.Conv2d",
    "from flash_attn.layers.rotary import ApplyRotaryEmb": "use apply_rotary_emb",
    "from flash_attn.modules.mha import MHA": "flash_attn.modules.mha.MHA is not in .* use a module of tileattn.nn",
    "from flash_attn.modules.mlp import Mlp": "torch.nn.Linear and an activation",
    "from flash_attn.modules.block import Block": "torch.nn's modules",
    "from flash_attn.models.bert import BertModel": 'attn_implementation="tileattn"',
    "from flash_attn.utils.benchmark import benchmark_forward": "tileattn.profile",
    "from flash_attn.utils.distributed import all_gather": "torch.distributed.nn.functional",
    "from flash_attn.flash_attn_triton import flash_attn_func": "tileattn.Bias",
    "from flash_attn.cute import flash_attn_varlen_func": "flash_attn.flash_attn_func",
    "from flash_attn import cute": "flash_attn.cute is not in",
    "from flash_attn import flash_attn_unpadded_func": "flash_attn.flash_attn_unpadded_func is not in",
    "from flash_attn.flash_attn_interface import flash_attn_gpu": "compiled extension",
    "import flash_attn._install": "flash_attn._install is not in",
    "import flash_attn.something.new": "flash_attn.something is not in",
}


@pytest.mark.parametrize("statement", ABSENT)
def test_other_imports_say_what_to_use(statement: str) -> None:
    """For those who ask by `try: ... except ImportError` as well, or by `except ModuleNotFoundError`."""
    for error in (NotImplementedError, ImportError, ModuleNotFoundError):
        with pytest.raises(error, match=ABSENT[statement]) as raised:
            exec(statement, {})
        assert type(raised.value) is NotProvided
        assert (raised.value.name or "").startswith("flash_attn")


@pytest.mark.parametrize("name", ["flash_attn.cute", "flash_attn.ops.fused_dense", "flash_attn.losses"])
def test_find_spec_finds_nothing_and_raises_nothing(name: str) -> None:
    """`torch._inductor` asks for flash_attn.cute in this way."""
    assert importlib.util.find_spec(name) is None
    assert name not in sys.modules


def test_find_spec_below_an_absent_package_is_an_import_error() -> None:
    """`find_spec` does the same for any package that is not installed."""
    with pytest.raises(ModuleNotFoundError):
        importlib.util.find_spec("flash_attn.losses.cross_entropy")


def test_other_names_are_missed_in_the_usual_way() -> None:
    for module in ("flash_attn_interface", "bert_padding", "layers.rotary", "modules.mha", "ops.triton.rotary"):
        imported = importlib.import_module(f"flash_attn.{module}")
        assert not hasattr(imported, "no_such_name")
        with pytest.raises(ImportError, match="cannot import name 'no_such_name'"):
            exec(f"from flash_attn.{module} import no_such_name", {})


def test_modules_that_are_there_load_once_and_load_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import flash_attn.layers.rotary

    assert importlib.import_module("tileattn.compat.flash_attn.layers.rotary") is flash_attn.layers.rotary
    sizes = importlib.import_module("tileattn.compat.flash_attn._block_sizes")
    assert importlib.reload(sizes) is sizes
    monkeypatch.setattr(compat, "_block_sizes", sizes)  # and so put back, here and below
    monkeypatch.delitem(sys.modules, sizes.__name__)
    assert importlib.import_module(sizes.__name__) is not sizes


def test_after_uninstalling_the_usual_error_is_back() -> None:
    compat.uninstall()
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'tileattn\.compat\.flash_attn\.cute'"):
        importlib.import_module("tileattn.compat.flash_attn.cute")


@pytest.mark.parametrize("name", ["rearrange", "repeat"])
def test_einops_functions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl and OpenRLHF import `rearrange` from bert_padding, where flash-attn has it from einops."""
    monkeypatch.setitem(sys.modules, "einops", None)  # not there
    with pytest.raises(ImportError, match=f"bert_padding.{name} is einops.{name}: pip install einops"):
        exec(f"from flash_attn.bert_padding import {name}", {})
    given = type(sys)("einops")
    setattr(given, name, function := object())
    monkeypatch.setitem(sys.modules, "einops", given)
    assert getattr(importlib.import_module("flash_attn.bert_padding"), name) is function
