"""The layouts of products in registers, for places where TileLang cannot infer them."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from .dq_order import RegisterOrder


def accumulator_layout(rows: int, columns: int) -> Any:
    """The layout in which wgmma leaves a product and reads a 16-bit first operand: 16 rows in each warp."""
    return T.Fragment([rows, columns], forward_thread_fn=_thread, forward_index_fn=_register)


def product_layout(order: RegisterOrder) -> Any:
    """The layout of dQ's product (or its transpose) on two warpgroups."""
    half = order.shape[1] // 2
    if not order.shares_columns:
        return accumulator_layout(*order.shape)
    return T.Fragment(
        list(order.shape),
        forward_thread_fn=lambda i, j: j // half * 128 + _thread(i, j % half),
        forward_index_fn=lambda i, j: _register(i, j % half),
    )


def rows_layout(order: RegisterOrder) -> Any:
    """The same layout, of a fragment with queries in rows and dims in columns."""
    if not order.transposed:
        return product_layout(order)
    return T.Fragment(
        [order.block_M, order.head_dim],
        forward_thread_fn=lambda q, d: _thread(d, q),
        forward_index_fn=lambda q, d: _register(d, q),
    )


def _thread(i: Any, j: Any) -> Any:
    return i // 16 * 32 + i % 8 * 4 + j % 8 // 2


def _register(i: Any, j: Any) -> Any:
    return j // 8 * 4 + i % 16 // 8 * 2 + j % 2
