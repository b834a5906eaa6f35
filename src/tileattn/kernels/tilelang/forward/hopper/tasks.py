"""Tasks of the Hopper schedule: their queries and keys, and the message that describes one; see kernel.py."""

from types import SimpleNamespace

import tilelang.language as T

from ...packed.ragged import tile as ragged_tile
from ...packed.tasks import find_task
from ...tile.expressions import Emitter
from ...tile.lists import length_of_line, line_of, mixed_of_line, tile_of_line
from ...tile.mask import Visibility
from ...tile.mixed_bits import place_of_line
from .plan import FIELDS, FOLLOWER, LEADER, PACKED_FIELDS
from .sorted_lists import pair_and_line, row_of_line

# A message's fields. A count of 0 says that no tile is left. Where sequences are packed, BATCH is a sequence's number,
# and four more say where it lies: the row behind its last in the whole tensor and its length, of queries and of keys.
# (A cluster's blocks copy wholes of 16 bytes.) With lists FIRST_KEY is the task's line, and BITS the place of its first
# tile's bits.
BATCH, HEAD, ROW, FIRST_KEY, RIGHT, LEFT, COUNT, BITS = range(FIELDS)
Q_END, Q_LEN, K_END, K_LEN = range(FIELDS, PACKED_FIELDS)


def sizes_of_task(plan, arg, w):
    """The object that holds this task's seqlen_q and seqlen_k."""
    return SimpleNamespace(seqlen_q=w.task[Q_LEN], seqlen_k=w.task[K_LEN]) if plan.packed else arg


def places(plan, arg, w, b):
    """The places of the task's rows in q, k and v, for :func:`rows_of`."""
    if plan.packed:
        of_q, of_k = (w.task[Q_END], w.task[Q_LEN]), (w.task[K_END], w.task[K_LEN])
        return of_q, of_k, of_k
    return tuple(T.min(b, tensor.shape[0] - 1) for tensor in (arg.q, arg.k, arg.v))


def place_of_o(plan, w, b):
    """The place of the task's rows in o."""
    return (w.task[Q_END], w.task[Q_LEN]) if plan.packed else b


def rows_of(plan, tensor, place, first, rows, head, columns):
    """Rows `first : first + rows` of a batch element, or of a sequence."""
    if plan.packed:
        return ragged_tile(tensor, *place, first, rows, head, columns)
    return tensor[place, first : first + rows, head, columns]


def task_total(plan, arg, w):
    """The number of tasks."""
    return w.total[0] if plan.packed else T.ceildiv(arg.seqlen_q, plan.rows) * arg.batch * arg.heads


def tile_of_step(plan, arg, w, j, count, right, left):
    """The j-th tile of a task's `count`: first those that need the mask, at the right and left ends, then the rest.

    Of a listed task it is read from its line, where those that need the mask come first as well.
    """
    if plan.listed:
        return T.alloc_var("int32", init=tile_of_line(arg, w.task[FIRST_KEY], j))[0]
    inner = count - 1 - j + left  # right ones: count - 1 - j; after them `left` steps went elsewhere
    if not plan.masks_inside:
        return count - 1 - j
    return T.if_then_else(j < right, count - 1 - j, T.if_then_else(j < right + left, j - right, inner))


def whole_tile(plan, arg, w, j, count, left):
    """The same where the tile is known to need no mask."""
    # Past the masked tiles; those at the left came before.
    return tile_of_step(plan, arg, w, j, count, 0, left) if plan.listed else count - 1 - j + left


def first_key_of(plan, w, tile):
    """The first key of a task's tile."""
    return tile * plan.block_N if plan.from_first_key or plan.listed else w.task[FIRST_KEY] + tile * plan.block_N


@T.macro
def write_message(plan, arg, w, turn, tile):
    """Writes the queries and keys of task number `tile`."""
    emit = Emitter(arg.operands)
    of = arg
    if plan.packed:
        b, h, row, q_start, q_len, k_start, k_len, run = find_task(arg, tile, plan.rows, True)
        w.message[turn % plan.messages, Q_END] = q_start + q_len
        w.message[turn % plan.messages, Q_LEN] = q_len
        w.message[turn % plan.messages, K_END] = k_start + k_len
        w.message[turn % plan.messages, K_LEN] = k_len
        of = SimpleNamespace(seqlen_q=q_len, seqlen_k=k_len)
        if plan.listed:
            # Lines of a run are in the order of its tiles, whose numbers are sorted: the longest is in the last place.
            place = line_of(arg, b, h, run + T.truncdiv(row, plan.rows))
            of_run = T.alloc_var("int32", init=row_of_line(arg, place))
            number = run + of_run
    else:
        tiles = T.ceildiv(arg.seqlen_q, plan.rows)
        if plan.listed:
            of_pair = pair_and_line(arg, tile, tiles)
            pair, number = T.alloc_var("int32", init=of_pair[0]), T.alloc_var("int32", init=of_pair[1])
        else:
            side = arg.side_by_side
            # Tiles in the order of the queue: `side_by_side` heads, whose keys and values fit into the L2 cache
            # together, begin with their last query tiles, which a causal mask makes longest.
            pair = T.alloc_var(
                "int32", init=T.truncdiv(tile, side * tiles) * side + T.truncmod(T.truncmod(tile, side * tiles), side)
            )
            row = T.alloc_var("int32", init=(tiles - 1 - T.truncdiv(T.truncmod(tile, side * tiles), side)) * plan.rows)
        b = T.alloc_var("int32", init=T.truncmod(pair, arg.batch) if plan.batch_first else T.truncdiv(pair, arg.heads))
        h = T.alloc_var("int32", init=T.truncdiv(pair, arg.batch) if plan.batch_first else T.truncmod(pair, arg.heads))
    if plan.listed:
        # At least one tile here as well: the first of the line, which is hidden then.
        first = T.alloc_var("int32", init=line_of(arg, b, h, number))
        seen = T.alloc_var("int32", init=length_of_line(arg, first))
        count = T.max(seen, 1)
    else:
        visible = Visibility(plan.traced, emit, of.seqlen_k)
        q_lo = row + of.seqlen_k - of.seqlen_q
        q_hi = T.min(q_lo + plan.rows, of.seqlen_k) - 1
        kv_lo, kv_hi = visible.kv_range(b, h, q_lo, q_hi)
        full_lo, full_hi = visible.full_range(b, h, q_lo, q_hi)
        # `count` tiles from the key `first` on; those in [full_begin, full_end) are fully visible. There is at least
        # one tile, fully masked where nothing is visible.
        first = T.alloc_var("int32", init=T.truncdiv(kv_lo, plan.key_step) * plan.key_step)
        count = T.alloc_var("int32", init=T.max(T.ceildiv(kv_hi - first, plan.block_N), 1))
        full_begin = T.ceildiv(T.max(full_lo - first, 0), plan.block_N)
        full_end = T.min(T.truncdiv(T.max(full_hi - first, 0), plan.block_N), count)
    w.message[turn % plan.messages, BATCH] = b
    w.message[turn % plan.messages, HEAD] = h
    if plan.listed and plan.packed:
        w.message[turn % plan.messages, ROW] = of_run * plan.rows
    else:
        w.message[turn % plan.messages, ROW] = row_of_line(arg, first) * plan.rows if plan.listed else row
    w.message[turn % plan.messages, FIRST_KEY] = first
    if plan.listed:
        w.message[turn % plan.messages, RIGHT] = T.if_then_else(seen > 0, mixed_of_line(arg, first), 1)
        w.message[turn % plan.messages, LEFT] = 0
        if plan.bits:
            w.message[turn % plan.messages, BITS] = place_of_line(arg, first)
    else:
        w.message[turn % plan.messages, RIGHT] = count - full_end
        w.message[turn % plan.messages, LEFT] = T.min(full_begin, full_end)
    w.message[turn % plan.messages, COUNT] = count


@T.macro
def send(plan, w, turn):
    """Signals the message to all warps of the leader, and copies it to the follower."""
    T.barrier_arrive(w.message_ready[turn % plan.messages])
    if plan.cluster > 1:
        T.fence_proxy_async()
        T.copy_cluster(
            w.message[turn % plan.messages, 0 : plan.fields],
            w.message[turn % plan.messages, 0 : plan.fields],
            dst_block=FOLLOWER,
            remote_barrier=w.message_ready[turn % plan.messages],
        )


@T.macro
def free_message(plan, w, turn):
    if plan.cluster > 1:
        T.mbarrier_arrive(w.message_free[turn % plan.messages], LEADER)
    else:
        T.barrier_arrive(w.message_free[turn % plan.messages])


@T.macro
def recall(plan, w, turn):
    """Reads the fields that the end of a task needs again, which then need no registers in the loops."""
    for field in (HEAD, ROW, Q_END, Q_LEN, K_END):
        w.task[field] = w.message[turn % plan.messages, field]
    w.task[ROW] += w.rank * plan.block_M  # as in read_message
    free_message(plan, w, turn)


@T.macro
def read_message(plan, w, turn, again=False):
    """Waits for the next task and keeps it in registers. `again`: whether it will be read again (:func:`recall`)."""
    T.barrier_wait(w.message_ready[turn % plan.messages], (turn // plan.messages) & 1)
    for field in T.unroll(plan.fields):
        w.task[field] = w.message[turn % plan.messages, field]
    w.task[ROW] += w.rank * plan.block_M
    if not again:
        free_message(plan, w, turn)
