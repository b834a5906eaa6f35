"""Variants: masks, score modifications, the expressions they are traced to, and the key that names them."""
