"""Functions for masks and score modifications, as users import them; the code is in variant/math.py."""

from .variant.math import *  # noqa: F403
from .variant.math import __all__ as __all__
