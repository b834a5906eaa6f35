"""The error for modules and names of flash-attn that this package does not have; its message names an alternative."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn


class NotProvided(ModuleNotFoundError, NotImplementedError):
    """Raised for a module or a name of flash-attn that this package does not have.

    It is an ImportError too, because code tests for an optional part of flash-attn with
    ``try: import ... except ImportError``.
    """


# The alternative to each module of flash-attn. An entry also applies to the module's submodules.
_MODULES = {
    "flash_attn": "the functions of flash_attn, and its modules flash_attn_interface, bert_padding, layers.rotary, "
    "modules.mha and ops.triton.rotary, which are here",
    "flash_attn.cute": "flash_attn.flash_attn_func, which chooses a kernel for the GPU by itself",
    "flash_attn.flash_attn_triton": "tileattn.attention(score_mod=tileattn.Bias(bias)) for attention with a bias",
    "flash_attn.flash_attn_triton_og": "flash_attn.flash_attn_func",
    "flash_attn.flash_blocksparse_attention": "tileattn.attention(mask=...), which skips tiles that are fully masked",
    "flash_attn.flash_blocksparse_attn_interface": "tileattn.attention(mask=...), which skips tiles that are fully "
    "masked",
    "flash_attn.layers.patch_embed": "torch.nn.Conv2d with stride equal to kernel_size",
    "flash_attn.losses": "torch.nn.CrossEntropyLoss",
    "flash_attn.models": 'transformers\' models with attn_implementation="tileattn" (tileattn.compat.transformers)',
    "flash_attn.modules": "torch.nn's modules; flash_attn.modules.mha has the attention modules that are here",
    "flash_attn.modules.mlp": "torch.nn.Linear and an activation of torch.nn.functional",
    "flash_attn.modules.embedding": "torch.nn.Embedding",
    "flash_attn.ops": "PyTorch's operations, which torch.compile fuses; flash_attn.ops.triton.rotary is here",
    "flash_attn.ops.activations": "the activations of torch.nn.functional, which torch.compile fuses",
    "flash_attn.ops.fused_dense": "torch.nn.Linear",
    "flash_attn.ops.layer_norm": "torch.nn.functional.dropout and torch.nn.LayerNorm, which torch.compile fuses",
    "flash_attn.ops.rms_norm": "torch.nn.RMSNorm, or torch.nn.functional.rms_norm",
    "flash_attn.ops.triton.cross_entropy": "torch.nn.functional.cross_entropy",
    "flash_attn.ops.triton.layer_norm": "torch.nn.LayerNorm or torch.nn.RMSNorm",
    "flash_attn.utils": "tileattn.profile for utils.benchmark, torch.distributed.nn.functional for utils.distributed",
}


def absent_module(name: str) -> NotProvided:
    """The error to raise for ``import name``."""
    known = name
    while known not in _MODULES:
        known = known.rpartition(".")[0]
    return _error(name, _MODULES[known], module=name)


def absent_names(module: str, alternatives: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """A ``__getattr__`` for a module: :class:`NotProvided` for the names in `alternatives`, else AttributeError.

    Args:
        module: the module's full name.
        alternatives: names that the module does not have, with the text that says what to use instead.
    """
    shown = "flash_attn" + module.removeprefix(__name__.rpartition(".")[0])

    def find(name: str) -> NoReturn:
        if name in alternatives:
            raise _error(f"{shown}.{name}", alternatives[name], module=shown)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return find


def _error(what: str, alternative: str, module: str) -> NotProvided:
    return NotProvided(
        f"{what} is not in tileattn.compat.flash_attn, which stands in for flash-attn: use {alternative}", name=module
    )
