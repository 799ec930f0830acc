"""The online softmax of a consumer, whose maxima stay and whose sums are of lanes.

Shapes: M rows of a consumer; N keys of a tile.
"""

from __future__ import annotations

from tilestream.backends.hopper.gluon_names import gl, jit
from tilestream.backends.hopper.score import log2_scores

__all__ = ["lane_sums", "rescaled", "scaled", "softmax"]

# Registers of `acc` that one branch guards. Of a thread's, four by four, two are of one row and two of another.
_RESCALE_PACK = gl.constexpr(32)
_RESCALE = gl.constexpr(
    "{ .reg .pred p; setp.neu.f32 p, $64, 0f3F800000; setp.neu.or.f32 p, $66, 0f3F800000, p;"
    " vote.sync.any.pred p, p, 0xffffffff; @!p bra.uni KEPT; "
    + " ".join(f"mul.rn.f32 ${i}, ${i}, ${64 + i};" for i in range(32))
    + " KEPT: }"
)
_RESCALE_OPERANDS = gl.constexpr(",".join(["=f"] * 32 + [str(i) for i in range(32)] + ["f"] * 32))


@jit
def lane_sums(p_mn, facts: gl.constexpr):
    """Sums of what every thread holds of a row: four threads share one, and add up after the last tile."""
    rows: gl.constexpr = p_mn.shape[0]
    return gl.sum(gl.sum(p_mn.reshape([rows, facts.block_n // 8, 4, 2]), 3), 1)


@jit
def scaled(x, factor):
    """Rows of `x` times their factors."""
    return x * gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout))[:, None]


@jit
def softmax(s_mn, row_max, numbers, facts: gl.constexpr):
    """(p_mn, its `lane_sums`, new maxima, factors that rescale what was summed before)."""
    new_max = gl.maximum(row_max, log2_scores(gl.max(s_mn, 1), numbers, facts))
    # A maximum that grows by little stays: the weights are then at most 2**8, and nothing needs to be rescaled.
    if facts.config.keeps_max:
        new_max = gl.where(new_max - row_max > 8.0, new_max, row_max)
    # A row that has seen no key yet: exp2(-inf - 0) = 0, not NaN.
    finite_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    p_mn = gl.exp2(log2_scores(s_mn, numbers, facts) - finite_max[:, None])
    alpha = gl.exp2(row_max - finite_max)
    return p_mn, lane_sums(p_mn, facts), new_max, alpha


@jit
def rescaled(acc, alpha, facts: gl.constexpr):
    """acc times alpha; nothing at all in a warp whose factors are all 1."""
    if facts.config.keeps_max:
        alpha = gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
        alpha, acc = gl.broadcast(alpha, acc)
        return gl.inline_asm_elementwise(
            _RESCALE, _RESCALE_OPERANDS, [acc, alpha], dtype=gl.float32, is_pure=True, pack=_RESCALE_PACK
        )
    else:
        return scaled(acc, alpha)
