"""FlexAttention's interface: positions, blocks, lazy masks, and how functions are joined."""

from __future__ import annotations

from ..mutant import Mutant, mutants

FUNCTIONS = ("compat/flex_attention/test_functions.py",)
BLOCKS = ("compat/flex_attention/test_block_masks.py",)
INTERFACE = ("compat/flex_attention/test_interface.py",)

MUTANTS: list[Mutant] = [
    *mutants(
        "variant/row_numbers.py",
        FUNCTIONS,
        {
            "flex: a mask's queries at the end of the keys": (
                "self.mask.allows(b, h, q - self.shift, k)",
                "self.mask.allows(b, h, q, k)",
            ),
            "flex: a score's queries at the end of the keys": (
                "self.mod(score, b, h, q - self.shift, k)",
                "self.mod(score, b, h, q, k)",
            ),
        },
    ),
    *mutants(
        "variant/row_numbers.py",
        BLOCKS,
        {
            "flex: bounds of keys of the first row alone": (
                "(q_hi - self.shift) // self.block_q",
                "(q_lo - self.shift) // self.block_q",
            ),
            "flex: bounds of rows without the shift": (
                "load(self.end_row, b, h, right) + self.shift",
                "load(self.end_row, b, h, right)",
            ),
        },
    ),
    *mutants(
        "compat/flex_attention/blocks.py",
        BLOCKS,
        {
            "flex: a full block asks mask_mod": (
                "(state == FULL) | ((state == PARTIAL) & mask(b, h, q, k))",
                "(state != ABSENT) & mask(b, h, q, k)",
            ),
            "flex: an absent block asks mask_mod": ("(state == PARTIAL) & mask", "(state != FULL) & mask"),
            "flex: a partial block is seen as a whole": (
                "mask = None if is_noop(mask_mod) else traceable_mask(mask_mod)",
                "mask = None",
            ),
            "flex: indices behind the count": (
                "(slot < counts[..., None]) & (indices >= 0)",
                "(slot < indices.shape[-1]) & (indices >= 0)",
            ),
            "flex: bounds forget later rows": (".amin(-1).flip(-1).cummin(-1).values.flip(-1)", ".amin(-1)"),
            "flex: bounds forget earlier rows": (".amax(-1).cummax(-1).values", ".amax(-1)"),
            "flex: a sliced mask is used": ("if block_mask.mask_mod is _SLICED:", "if False:"),
        },
    ),
    *mutants(
        "compat/flex_attention/lazy.py",
        BLOCKS,
        {
            "flex: blocks of a mask_mod that was set later": ('in ("mask_mod", "seq_lengths"', 'in ("seq_lengths"'),
            "flex: a crop keeps its lengths": ("seq_lengths=(new_q_len, new_kv_len)", "seq_lengths=self.seq_lengths"),
        },
    ),
    *mutants(
        "compat/flex_attention/mods.py",
        FUNCTIONS,
        {
            "flex: and is or": ("result = result & mask(", "result = result | mask("),
            "flex: or is and": ("result = result | mask(", "result = result & mask("),
        },
    ),
    *mutants(
        "compat/flex_attention/tracing.py",
        FUNCTIONS,
        {
            "flex: sizes of tables are constants": ("_with_symbols(mod)(*arguments)", "mod(*arguments)"),
            "flex: zeros of a position are ones": ("_constant(0, size, options", "_constant(1, size, options"),
        },
    ),
    *mutants(
        "compat/flex_attention/interface.py",
        INTERFACE,
        {
            "flex: lse that nobody asked for": ("lse if return_aux.lse else None", "lse"),
            "flex: groups without enable_gqa": ("if not enable_gqa and heads != kv_heads:", "if False:"),
        },
    ),
    *mutants(
        "compat/flex_attention/kernel_options.py",
        INTERFACE,
        {"flex: another kernel than the named one": ('if value != "AUTO":', "if False:")},
    ),
]
