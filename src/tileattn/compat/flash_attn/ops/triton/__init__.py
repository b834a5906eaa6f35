"""``flash_attn.ops.triton``: of its modules only :mod:`rotary` is here."""
