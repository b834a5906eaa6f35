"""``flash_attn.modules``, of which tileattn provides only :mod:`mha`."""
