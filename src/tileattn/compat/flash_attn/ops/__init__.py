"""``flash_attn.ops``: of its modules only :mod:`triton.rotary` is here."""
