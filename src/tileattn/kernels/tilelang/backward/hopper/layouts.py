"""The layouts of products in registers, for places where TileLang cannot infer them."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from ...tile.matrices import accumulator_layout, register_of, thread_of
from .dq_order import RegisterOrder


def product_layout(order: RegisterOrder) -> Any:
    """The layout of dQ's product (or its transpose) on two warpgroups."""
    half = order.shape[1] // 2
    if not order.shares_columns:
        return accumulator_layout(*order.shape)
    return T.Fragment(
        list(order.shape),
        forward_thread_fn=lambda i, j: j // half * 128 + thread_of(i, j % half),
        forward_index_fn=lambda i, j: register_of(i, j % half),
    )


def rows_layout(order: RegisterOrder) -> Any:
    """The same layout, of a fragment with queries in rows and dims in columns."""
    if not order.transposed:
        return product_layout(order)
    return T.Fragment(
        [order.block_M, order.head_dim],
        forward_thread_fn=lambda q, d: thread_of(d, q),
        forward_index_fn=lambda q, d: register_of(d, q),
    )
