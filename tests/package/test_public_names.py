"""Names that users have in their code, wherever the code behind them lies: paths, operators, commands and options.

A path that README, the documents, the examples or an error message have shown stays. What is here may grow.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import click
import pytest
import torch
import typer

import tileattn
from tests import fresh_process
from tileattn.cli.app import app
from tileattn.cli.choices import SHORT_NAMES

# One-line modules: where they are, where the code is (one module or several), and the names that both have.
MOVED = {
    "math": (
        "variant.math",
        "abs clamp cos exp exp2 load log log2 maximum minimum relu sigmoid silu sin softplus sqrt square tanh where",
    ),
    "masks": (
        "variant.masks variant.sparse.patterns variant.sparse.neighborhood variant.sparse.blocks "
        "variant.sparse.block_lists",
        "Mask Causal SlidingWindow PrefixLM Documents KeyPadding FunctionMask And Or Range FIRST_POSITION "
        "check_key_padding Dilated Strided GlobalTokens Neighborhood ImageTextDocuments BlockSparse check_blocks",
    ),
    "scores": ("variant.scores", "ScoreMod SoftCap ALiBi Bias PackedBias for_packed"),
    "profiling": ("measure.profiling", "profile profile_all machine_ceiling Profile Profiles"),
    "bench.timing": ("measure.timing", "Effort DEFAULT sample_ms time_calls"),
}
# Other paths that users have been shown, and names that they take from there.
PATHS = {
    "nn": "NaiveAttention FlashAttentionV1 FlashAttentionV2 MaskedAttention TritonFlashAttention get_attention",
    "parallel": "Plan RankError Simulation Topology Traffic simulate",
    "viz": "draw_tiles tile_map mask_tiles draw_weights draw_softmax draw_lengths draw_dashboard",
    "testing": "assert_accurate assert_forward_accurate assert_gradients_accurate oracle_attention eager_attention "
    "dropout_mask similarity dissimilarity emulate",
    "reference": "standard_attention flash_attention_1 flash_attention_2",
    "compat.transformers": "register",
    "compat.flash_attn": "install uninstall flash_attn_func flash_attn_varlen_func",
    "compat.flash_attn.flash_attn_interface": "flash_attn_func flash_attn_varlen_func flash_attn_with_kvcache",
    "compat.flash_attn.bert_padding": "pad_input unpad_input index_first_axis",
    "compat.flash_attn.layers.rotary": "RotaryEmbedding apply_rotary_emb",
    "compat.flash_attn.ops.triton.rotary": "apply_rotary",
    "compat.flash_attn.modules.mha": "FlashSelfAttention FlashCrossAttention",
    "compat.torch_sdpa": "Handle",
    "compat.flex_attention": "flex_attention create_block_mask create_mask BlockMask AuxRequest AuxOutput "
    "FlexKernelOptions and_masks or_masks noop_mask",
    "compat.vllm": "load_plugin register",
    "compat.sglang": "register",
    "bench.results": "load begin",
}
OPERATORS = {
    "decode": "q k_cache v_cache seqlens_k page_table cu_seqlens_q sink variant tensors ints floats scale max_seqlen_q "
    "splits fixed return_lse backend plan made_for",
    "forward": "q k v sink variant tensors ints floats scale backend q_descale k_descale v_descale deterministic "
    "needs_grad dropout_p seed cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
    "backward": "do dlse q k v o lse sink variant tensors ints floats scale backend deterministic needs dropout_p seed "
    "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
    "append_kv": "k v k_cache v_cache seqlens_k page_table cu_seqlens_q cos sin interleaved positions q q_positions "
    "backend",
}
COMMANDS = {
    "info": "--arch",
    "bench": "--suite --batch --B --heads --H --kv-heads --KV --seqlen --N --seqlen-k --head-dim --D --head-dim-v "
    "--Dv --packing --causal --mask "
    "--softcap --alibi --bias --sink --variant --dtype --direction --device --backend --baselines --rounds --rows "
    "--resume --seed --cases --draws --compile --json --plot --force --commit --quiet -q",
    "memory": "--seqlen --N --batch --B --heads --H --kv-heads --KV --head-dim --D --causal --dtype --direction "
    "--device --backend "
    "--baselines --json --plot --force --commit --quiet -q",
    "ladder": "--batch --B --heads --H --seqlen --N --head-dim --D --iters --causal --dtype --plot --json --force "
    "--tiles",
    "plot": "--output -o --force",
    "warmup": "--head-dim --D --variant --dtype --direction --page-size --rotary --arch",
    "tune": "--suite --batch --B --heads --H --kv-heads --KV --seqlen --N --seqlen-k --head-dim --D --head-dim-v --Dv "
    "--causal --mask --softcap --alibi --bias --sink --variant --dtype --direction --device --backend --again --show "
    "--clear --yes -y --quiet -q",
    "demo": "--port --device --browser --no-browser",
    "viz tiles": "--seqlen --N --seqlen-k --causal --mask --function --block-M --block-N --arch --head-dim --D "
    "--output -o --force",
    "viz weights": "--seqlen --N --seqlen-k --heads --H --head-dim --D --causal --mask --softcap --alibi --seed "
    "--output -o "
    "--force",
    "viz softmax": "--seqlen --N --block-N --row --head-dim --D --causal --mask --softcap --alibi --seed --output "
    "-o --force",
    "viz plan": "--lengths --kv-heads --KV --block-N --blocks --output -o --force",
    "viz lengths": "--variant --output -o --force",
    "viz dashboard": "--output -o --force",
}


@pytest.mark.parametrize("path", MOVED)
def test_a_one_line_module_has_the_objects_of_the_code(path: str) -> None:
    where, names = MOVED[path]
    shown, *codes = (importlib.import_module(f"tileattn.{each}") for each in (path, *where.split()))
    assert set(shown.__all__) == set(names.split())
    for name in names.split():
        assert any(getattr(shown, name) is getattr(code, name, None) for code in codes), name
    for code in codes:
        assert set(getattr(code, "__all__", shown.__all__)) == set(shown.__all__)


@pytest.mark.parametrize("path", PATHS)
def test_paths_that_were_shown_lead_to_their_names(path: str) -> None:
    module = importlib.import_module(f"tileattn.{path}")
    assert [name for name in PATHS[path].split() if not hasattr(module, name)] == []


def test_what_the_package_exports_are_the_same_objects() -> None:
    for path in ("masks", "scores"):
        module = importlib.import_module(f"tileattn.{path}")
        for name in set(tileattn.__all__) & set(module.__all__):
            assert getattr(tileattn, name) is getattr(module, name), name
    assert tileattn.math is importlib.import_module("tileattn.math")
    assert tileattn.profile is importlib.import_module("tileattn.profiling").profile


def test_paths_are_there_whatever_is_imported_first() -> None:
    """Modules that are attributes of the package need no import of their own."""
    code = "import tileattn; tileattn.math.tanh(0.5), tileattn.masks.Causal, tileattn.scores.ALiBi, tileattn.nn"
    for statement in (code, *(f"import tileattn.{path}" for path in ("math", "profiling"))):
        fresh_process.run(statement)


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_have_their_names_and_arguments(name: str) -> None:
    schema = getattr(torch.ops.tileattn, name).default._schema
    assert schema.name == f"tileattn::{name}"
    assert [argument.name for argument in schema.arguments] == OPERATORS[name].split()


def commands(group: click.Command, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    inner = getattr(group, "commands", None)
    if inner is None:
        yield prefix, group
    else:
        for name, command in inner.items():
            yield from commands(command, f"{prefix} {name}".strip())


FOUND = dict(commands(typer.main.get_command(app)))


def test_every_command_has_the_letters_of_the_papers_beside_the_long_names() -> None:
    for name, command in FOUND.items():
        for each in command.params:
            for long in set(each.opts) & set(SHORT_NAMES):
                assert SHORT_NAMES[long] in each.opts, (name, long)


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_have_their_options(name: str) -> None:
    options = {text for each in FOUND[name].params for text in (*each.opts, *each.secondary_opts)}
    assert set(COMMANDS[name].split()) - options == set()
