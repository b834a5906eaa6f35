"""Where a warp stands in the stages of K and V: in registers, counted along; see kernel.py."""

import tilelang.language as T

# Fields of the state: the stage of the next tile, and the parity that its barriers are waited for with.
STAGE, PARITY = range(2)


def stage_of(plan, w):
    """The stage of the next tile, in bounds that the compiler sees: without them addresses contain divisions."""
    return T.min(T.max(w.at[STAGE], 0), plan.stages - 1)


@T.macro
def next_stage(plan, w):
    """To the next stage. The parity flips behind the last one."""
    last = w.at[STAGE] == plan.stages - 1
    w.at[PARITY] = T.if_then_else(last, w.at[PARITY] ^ 1, w.at[PARITY])
    w.at[STAGE] = T.if_then_else(last, 0, w.at[STAGE] + 1)
