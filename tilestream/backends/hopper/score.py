"""The score pipeline on one tile of a consumer: `triton.score`'s, with a mask and distances that take few registers.

Key 8 a + 2 b + c of a tile lies in lane b of four and, in that thread, at a place that follows from a and c: these two
are constants of the instructions, and no thread holds the numbers of its keys in registers.

Shapes: M rows of a consumer; N keys of a tile, as (N / 8, 4, 2) where tiles are wide.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tilestream.backends.hopper.gluon_names import gl, jit
from tilestream.backends.triton.score import LOG2E, bias_log2, biased, capped_scores, sink_log2

__all__ = ["Rows", "head_sink", "head_slope", "log2_scores", "masked", "scores"]


class Rows(NamedTuple):
    """The rows of a consumer, and whose they are."""

    i: Any  # (M)
    head: Any
    slope: Any  # `head_slope`
    sequence: Any  # `triton.tiles.Sequence`


@jit
def _wide(s_mn, i, facts: gl.constexpr):
    """(scores, rows, a, b, c) in four dimensions: (M, N / 8, 4, 2)."""
    eighths: gl.constexpr = facts.block_n // 8
    wide = s_mn.reshape([s_mn.shape[0], eighths, 4, 2])
    layout: gl.constexpr = wide.type.layout
    a = gl.arange(0, eighths, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    b = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout))))
    c = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    i = gl.convert_layout(i, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    return wide, i, a[None, :, None, None], b[None, None, :, None], c[None, None, None, :]


@jit
def _narrow(wide, s_mn):
    return gl.convert_layout(wide.reshape(s_mn.shape), s_mn.type.layout)


@jit
def masked(s_mn, rows, n_start, tensors, facts: gl.constexpr):
    """Scores with -inf where the band or the end of the keys hides them; or the block mask, whose lists know both."""
    if facts.has_blocks:
        return _shown(s_mn, rows, n_start, tensors, facts)
    else:
        return _in_band(s_mn, rows, n_start, facts)


@jit
def _shown(s_mn, rows, place, tensors, facts: gl.constexpr):
    """Scores with -inf where the bits of a PARTIAL tile, at a place in the lists, are 0.

    A thread has the words of its rows, and of key 32 w + 8 a + 2 b + c a bit that is a constant after a shift by 2 b.
    """
    num_words: gl.constexpr = facts.block_n // 32
    wide = s_mn.reshape([s_mn.shape[0], num_words, 4, 4, 2])
    layout: gl.constexpr = wide.type.layout
    words_layout: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, layout)))
    w = gl.arange(0, num_words, layout=gl.SliceLayout(0, words_layout))
    i = gl.convert_layout(rows.i % facts.block_m, gl.SliceLayout(1, words_layout))
    a_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(4, layout))))
    b_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, layout))))
    c_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    a = gl.arange(0, 4, layout=a_layout)[None, None, :, None, None]
    b = gl.arange(0, 4, layout=b_layout)[None, None, None, :, None]
    c = gl.arange(0, 2, layout=c_layout)[None, None, None, None, :]
    bits = tensors.bits + gl.load(tensors.patterns + place).to(gl.int64) * (facts.block_m * num_words)
    words = gl.load(bits + (i[:, None] * num_words + w[None, :]))
    visible = ((words[:, :, None, None, None] >> (2 * b)) & (1 << (8 * a + c))) != 0
    return _narrow(gl.where(visible, wide, float("-inf")), s_mn)


@jit
def _in_band(s_mn, rows, n_start, facts: gl.constexpr):
    sequence = rows.sequence
    wide, i, a, b, c = _wide(s_mn, rows.i, facts)
    j = 8 * a + c
    start = n_start + 2 * b
    # Opaque: without a band all of this is the same in every tile, and 64 predicates would be kept in registers.
    last = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [i * 0 + (sequence.seqlen_k - 1)], dtype=gl.int32, is_pure=False, pack=1
    )
    if facts.has_right:
        last = gl.minimum(last, i + sequence.right_edge)
    visible = j <= last[:, None, None, None] - start
    if facts.has_left:
        visible = visible & (j >= (i + sequence.left_edge)[:, None, None, None] - start)
    return _narrow(gl.where(visible, wide, float("-inf")), s_mn)


@jit
def scores(s_mn, rows, n_start, tensors, numbers, facts: gl.constexpr):
    """Scores from dot products, before the mask, as `triton.score.score_tile` leaves them."""
    if facts.folds_scale:
        return s_mn
    else:
        sequence = rows.sequence
        s_mn, _capped = capped_scores(s_mn, numbers, facts)
        if facts.has_alibi:
            wide, i, a, b, c = _wide(s_mn, rows.i, facts)
            # In float32 from here on, which is exact up to 2**24: whole numbers would all have to be converted.
            first = (n_start - sequence.shift - i[:, None, None, None] + 2 * b).to(gl.float32)
            s_mn = _narrow(wide - rows.slope * gl.abs(first + (8 * a + c).to(gl.float32)), s_mn)
        if facts.has_bias:
            wide, i, a, b, c = _wide(s_mn, rows.i, facts)
            i = i[:, None, None, None]
            strides = numbers.bias_strides
            row_bias = tensors.bias + sequence.batch.to(gl.int64) * strides[0] + rows.head.to(gl.int64) * strides[1]
            row_bias = row_bias + i.to(gl.int64) * strides[2] + (n_start + 2 * b) * facts.bias_step
            are_inside = (i < sequence.seqlen_q) & (8 * a + c < sequence.seqlen_k - n_start - 2 * b)
            # In 64 bits these are constants of the instructions, and a thread has one pointer a row.
            bias = gl.load(row_bias + (8 * a + c).to(gl.int64) * facts.bias_step, are_inside, other=0.0)
            s_mn = _narrow(biased(wide, bias_log2(bias)), s_mn)
        return s_mn


@jit
def log2_scores(s_mn, numbers, facts: gl.constexpr):
    """Scores as `scores` leaves them, or their maxima, in units of log 2."""
    if facts.folds_scale:
        return s_mn * numbers.scale_log2
    else:
        return s_mn


@jit
def head_slope(head, sequence, tensors, numbers, facts: gl.constexpr):
    """The ALiBi slope of a head in units of log 2, where there is one."""
    if facts.has_alibi:
        # Tokens after the last sequence have a batch index one too large.
        batch = gl.minimum(sequence.batch, numbers.batch - 1)
        return gl.load(tensors.slopes + batch * numbers.slopes_stride + head) * LOG2E
    else:
        return 0.0


@jit
def head_sink(head, sequence, tensors, numbers):
    """The sink of a head in units of log 2; -inf for tokens after the last sequence, which have none."""
    sink = sink_log2(gl.load(tensors.sinks + head))
    return gl.where(sequence.batch < numbers.batch, sink, float("-inf"))
