"""``flash_attn.layers``: of its modules only :mod:`rotary` is here."""
