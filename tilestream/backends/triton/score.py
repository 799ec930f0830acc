"""The score pipeline on one tile, its derivative, and the dropout mask; the device twin of `spec`'s order.

Scores leave `score_tile` in units of log 2, where the exponential is one instruction; or, where nothing but a positive
scale stands between the dot product and the softmax (``facts.folds_scale``), as dot products, whose scale goes into the
exponential's argument. Positions are shaped to broadcast over the tile, so that (M, N) tiles and their transposes are
served alike.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.backends.triton.tiles import row_heads

__all__ = [
    "LN2",
    "LOG2E",
    "bias_log2",
    "biased",
    "capped_scores",
    "keep_tile",
    "probabilities",
    "row_slopes",
    "score_derivative",
    "score_tile",
    "sink_log2",
]

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
_NEAR_ZERO = tl.constexpr(0.45)
# Times LOG2E it is the lowest float32, nearly.
_LOWEST_BIAS = tl.constexpr(-2.35e38)


@triton.jit
def _tanh(x, facts: tl.constexpr):
    """tanh from exp2. For float32 inputs the Taylor polynomial near 0, where the other form cancels."""
    t = 2.0 / (1.0 + tl.exp2(tl.abs(x) * (2.0 * LOG2E)))
    far = tl.where(x < 0, t - 1.0, 1.0 - t)
    if facts.is_float32:
        y = x * x
        # Up to x**13: the next term is below half a last place within _NEAR_ZERO.
        series = 21844.0 / 6081075.0 * y - 1382.0 / 155925.0
        series = series * y + 62.0 / 2835.0
        series = series * y - 17.0 / 315.0
        series = series * y + 2.0 / 15.0
        series = series * y - 1.0 / 3.0
        return tl.where(tl.abs(x) < _NEAR_ZERO, x + x * (y * series), far)
    else:
        return far


@triton.jit
def row_slopes(rows, sequence, tensors, numbers, facts: tl.constexpr):
    """ALiBi slopes of packed rows, in units of log 2."""
    _, head = row_heads(rows, sequence, facts)
    # Tokens after the last sequence have a batch index one too large.
    batch = tl.minimum(sequence.batch, numbers.batch - 1)
    return tl.load(tensors.slopes + batch * numbers.slopes_stride + head) * LOG2E


@triton.jit
def _visible(i, j, rows_inside, sequence, facts: tl.constexpr):
    """Which pairs of a PARTIAL tile are visible."""
    visible = (j < sequence.seqlen_k) & rows_inside
    if facts.has_left:
        visible = visible & (j >= i + sequence.left_edge)
    if facts.has_right:
        visible = visible & (j <= i + sequence.right_edge)
    return visible


@triton.jit
def _is_shown(lines, along, start, entry, bits, facts: tl.constexpr):
    """Which pairs of a tile its pattern shows; all where it has none.

    A line of the tile has its bits side by side. Words are loaded for lines, not for pairs: few registers.

    Args:
        lines, along: queries and keys, or by keys the other way round; shaped to broadcast.
        start: the first of `along`.
        entry: where the list has the tile.
    """
    LINES: tl.constexpr = facts.list_n if facts.by_keys else facts.list_m
    LENGTH: tl.constexpr = facts.list_m if facts.by_keys else facts.list_n
    BLOCK: tl.constexpr = facts.block_m if facts.by_keys else facts.block_n
    WORDS: tl.constexpr = (LENGTH + 31) // 32
    pattern = tl.load(entry + 1)
    first = bits + (pattern.to(tl.int64) * (LINES * WORDS) + (start & (LENGTH - 1)) // 32)
    places = first + (lines & (LINES - 1)) * WORDS
    words = tl.load(places, pattern >= 0, other=-1)
    for word in tl.static_range(1, (BLOCK + 31) // 32):
        words = tl.where((along - start) // 32 == word, tl.load(places + word, pattern >= 0, other=-1), words)
    return ((words >> (along & (LENGTH - 1) & 31)) & 1) != 0


@triton.jit
def capped_scores(s, numbers, facts: tl.constexpr):
    """Dot products times the scale, below the softcap; and its tanh, where there is one."""
    capped = s
    if facts.has_softcap:
        capped = _tanh(s * numbers.softcap_in, facts)
        s = capped * numbers.softcap_out
    else:
        s = s * numbers.scale_log2
    return s, capped


@triton.jit
def _bias_tile(i, j, head, are_inside, sequence, tensors, numbers):
    strides = numbers.bias_strides
    offsets = sequence.batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    offsets = offsets + i.to(tl.int64) * strides[2] + j.to(tl.int64) * strides[3]
    return bias_log2(tl.load(tensors.bias + offsets, are_inside & (j < sequence.seqlen_k), other=0.0))


@triton.jit
def bias_log2(bias):
    """A bias as it is in memory, in units of log 2."""
    bias = bias.to(tl.float32)
    # The most negative numbers must not become -inf, which hides.
    scaled = tl.where(bias < _LOWEST_BIAS, _LOWEST_BIAS, bias) * LOG2E
    return tl.where(bias == float("-inf"), bias, scaled)


@triton.jit
def sink_log2(sink):
    """A sink in units of log 2: the largest numbers must not become infinite."""
    scaled = tl.where(sink > -_LOWEST_BIAS, -_LOWEST_BIAS, sink) * LOG2E
    return tl.where(sink == float("inf"), sink, scaled)


@triton.jit
def biased(s, bias):
    """Scores with their bias, in the same units."""
    # Not a sum only: -inf hides whatever the key holds.
    return tl.where(bias == float("-inf"), bias, s + bias)


@triton.jit
def score_tile(
    s, i, j, head, slopes, rows_inside, sequence, tensors, numbers, is_partial, start, entry, facts: tl.constexpr
):  # fmt: skip
    """Scores from dot products `s`, masked where the tile is PARTIAL; and the softcap's tanh, where there is one.

    `start` and `entry` are those of a visit, with a block mask (`visits.py`).
    """
    capped = s
    if not facts.folds_scale:
        s, capped = capped_scores(s, numbers, facts)
        if facts.has_alibi:
            s -= slopes * tl.abs(j - i - sequence.shift).to(tl.float32)
        if facts.has_bias:
            s = biased(s, _bias_tile(i, j, head, rows_inside, sequence, tensors, numbers))
    if is_partial:
        visible = _visible(i, j, rows_inside, sequence, facts)
        if facts.has_blocks:
            if facts.by_keys:
                visible = visible & _is_shown(
                    j, i, start, tensors.key_tiles + 2 * entry.to(tl.int64), tensors.key_bits, facts
                )
            else:
                visible = visible & _is_shown(
                    i, j, start, tensors.row_tiles + 2 * entry.to(tl.int64), tensors.row_bits, facts
                )
        s = tl.where(visible, s, float("-inf"))
    return s, capped


@triton.jit
def probabilities(s, lse_log2, numbers, facts: tl.constexpr):
    """exp(score - lse), of scores as `score_tile` leaves them."""
    if facts.folds_scale:
        return tl.exp2(s * numbers.scale_log2 - lse_log2)
    else:
        return tl.exp2(s - lse_log2)


@triton.jit
def score_derivative(ds, capped, facts: tl.constexpr):
    """The gradient of scale * dot product from that of the scores."""
    if facts.has_softcap:
        # Where ds is 0 the tanh of a hidden key may be NaN.
        return tl.where(ds == 0.0, 0.0, ds * (1.0 - capped * capped))
    else:
        return ds


@triton.jit
def keep_tile(rows, n_start, sequence, tensors, numbers, facts: tl.constexpr):
    """Which entries of the (M, N) tile survive dropout: `tilestream.dropout`, four keys per Philox call."""
    i, head = row_heads(rows, sequence, facts)
    seed = tl.load(tensors.seed)
    zeros = tl.full([facts.block_m, facts.block_n // 4], 0, tl.int32)
    groups = n_start // 4 + tl.arange(0, facts.block_n // 4)
    w0, w1, w2, w3 = tl.philox(
        seed, zeros + groups[None, :], zeros + i[:, None], zeros + head[:, None], zeros + sequence.batch
    )
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(facts.block_m, facts.block_n)
    return words.to(tl.uint32, bitcast=True) < numbers.keep_threshold.to(tl.uint32)
