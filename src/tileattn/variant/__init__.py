"""Variants: masks, score modifications, the expressions they are traced to, and the key that names them."""

# Keys name masks by their classes, also in a process that makes none: all of the package's must be known.
from . import row_numbers as row_numbers
from .sparse import blocks as blocks
from .sparse import known_blocks as known_blocks
from .sparse import neighborhood as neighborhood
from .sparse import patterns as patterns
