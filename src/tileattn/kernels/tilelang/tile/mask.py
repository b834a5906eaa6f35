"""The mask and the score modification on a tile of scores, for all schedules."""

import tilelang.language as T
import torch

from ....variant.expression import Expr, nodes
from .expressions import Emitter, key_in_tile
from .simplify import score_program, tanh_by_exp2


class Visibility:
    """The mask of one kernel: key ranges of tiles, and visibility of elements.

    Positions are bottom-right aligned; ``emit`` turns the program's expressions into TileLang's.
    """

    def __init__(self, program, emit, seqlen_k) -> None:
        self.program = program
        self.emit, self.emit_clamped = emit, Emitter(emit.values, clamps=True)
        self.seqlen_k = seqlen_k
        self.allowed = tanh_by_exp2(program.allows)  # a mask has no tolerance for the hardware's tanh
        self.bounded = is_causal(program.allows) and all(node.op != "load" for node in nodes(program.allows))

    def kv_range(self, b, h, q_lo, q_hi):
        """Keys [lo, hi) that the tile of query positions q_lo..q_hi visits, within 0 .. seqlen_k."""
        return self._clamped(self.program.kv_range, b, h, q_lo, q_hi)

    def full_range(self, b, h, q_lo, q_hi):
        """Keys [lo, hi) that all queries of the tile see."""
        return self._clamped(self.program.full_range, b, h, q_lo, q_hi)

    def _clamped(self, bounds, b, h, q_lo, q_hi):
        lo, hi = (self.emit(bound, b=b, h=h, q_lo=q_lo, q_hi=q_hi, seqlen_k=self.seqlen_k) for bound in bounds)
        return T.max(lo, 0), T.min(hi, self.seqlen_k)

    def allows(self, b, h, q, k):
        """May position q see position k? False beyond the last key, where a tile holds zeros.

        No query position is beyond the last key, so that a causal mask needs no comparison with seqlen_k. (Rows of a
        tile beyond the last query then see zeros, and are not stored.)
        """
        within = k < self.seqlen_k
        if self.program.allows is None:
            return within
        allowed = self.emit_clamped(self.allowed, b=b, h=h, q=q, k=k)
        return allowed if self.bounded else within & allowed


def is_causal(allows):
    """Whether the mask can be seen to hide all keys after the query's own."""
    if not isinstance(allows, Expr):
        return False
    return str(allows) == "(le k q)" or (allows.op == "and" and any(map(is_causal, allows.args)))


@T.macro
def apply_mask(acc_s, visible, b, h, q_lo, k_lo):
    """s[i, j] = -inf where the mask forbids it."""
    block_M, block_N = acc_s.shape
    for i, j in T.Parallel(block_M, block_N):
        acc_s[i, j] = T.if_then_else(visible.allows(b, h, q_lo + i, k_lo + j), acc_s[i, j], -T.infinity("float32"))


def width_of_ints(program):
    """The dtype of registers for integers: int64 if the variant reads int64 tensors, else int32."""
    return "int64" if any(tensor.dtype == torch.int64 for tensor in program.tensors) else "int32"


class Score:
    """The score modification of one kernel: rewritten (simplify.py), with its uniform values kept in registers.

    The hardware's tanh errs by 2^-11 of itself, an eighth of a rounding to bfloat16, to which eager rounds scores.
    """

    def __init__(self, call, program) -> None:
        hardware_tanh = call.dtype == torch.bfloat16 and call.arch.startswith("sm_")
        self.program = score_program(program.score, hardware_tanh, is_causal(program.allows))
        self.ints = width_of_ints(program)
        # The emitted score then lies within -1 .. 1.
        self.is_bounded = isinstance(self.program.score, Expr) and self.program.score.op == "tanh"

    def allocate(self):
        """A register for each uniform value, of either type."""
        count = max(len(self.program.uniforms), 1)
        return {kind: T.alloc_local([count], kind) for kind in self._kinds()}

    def _kinds(self):
        return {self.kind(uniform) for uniform in self.program.uniforms}

    def kind(self, uniform):
        """The dtype of the register that keeps a uniform value."""
        return self.ints if uniform.dtype == "int" else "float32"

    def values(self, registers):
        """The uniform values' symbols."""
        uniforms = enumerate(self.program.uniforms)
        return {f"uniform{index}": registers[self.kind(uniform)][index] for index, uniform in uniforms}

    def log2_unit(self, registers):
        """The factor that makes emitted scores powers of two."""
        unit = self.program.log2_unit
        return self.values(registers)[unit.args[0]] if isinstance(unit, Expr) else unit


@T.macro
def keep_uniforms(score, registers, emit, scale, b, h):
    """Computes the values that all scores of a head share."""
    for index, uniform in enumerate(score.program.uniforms):
        registers[score.kind(uniform)][index] = T.cast(emit.exact(uniform, scale=scale, b=b, h=h), score.kind(uniform))


@T.macro
def apply_score(acc_s, score, registers, emit, scale, b, h, q_lo, k_lo):
    """s[i, j] = score_mod(scale * s[i, j]), in the unit that :meth:`Score.log2_unit` tells."""
    block_M, block_N = acc_s.shape
    for i, j in T.Parallel(block_M, block_N):
        acc_s[i, j] = T.cast(
            emit(
                score.program.score,
                **score.values(registers),
                raw=acc_s[i, j],
                scale=scale,
                b=b,
                h=h,
                q=q_lo + i,
                k=key_in_tile(k_lo, j),
                i=i,
                j=j,
            ),
            "float32",
        )
