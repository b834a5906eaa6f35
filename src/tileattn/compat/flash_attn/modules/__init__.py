"""``flash_attn.modules``: of its modules only :mod:`mha` is here."""
