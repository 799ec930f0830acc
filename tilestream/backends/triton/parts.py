"""float32 operands as three bfloat16 parts, high, middle and low, whose sum they are: the matrix units multiply those.

Triton's own six products of parts split both operands in registers, for every product anew. Here the tensors are split
once, in memory, and the parts go from there into shared memory; what is split in registers is only P and dS.
Parts of a tensor lie as (row, part, column), in whole tiles of `Facts.row_block` rows and padded columns: no load is
masked, and one address serves all three.

Numerics: the products of low with middle and low parts, below 2**-24 of the result, are left out. A number that is not
finite has lower parts that are NaN, so every sum that meets one is not finite, and is computed again (`careful.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "delayed",
    "dot_parts",
    "load_parts",
    "part_offsets",
    "part_pointers",
    "split",
    "store_parts",
    "trans_parts",
    "zeros_after",
]

# From here on a finite number rounds to infinity.
_LARGEST = tl.constexpr(3.3895e38)


@triton.jit
def split(x):
    """(high, middle, low) of float32 numbers in registers."""
    return _split_below(x, x.to(tl.bfloat16))


@triton.jit
def _split_below(x, high):
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def part_offsets(count: tl.constexpr, WIDTH: tl.constexpr):
    """Offsets of the high parts of a tile, from its first row on."""
    return tl.arange(0, count)[:, None] * (3 * WIDTH) + tl.arange(0, WIDTH)[None, :]


@triton.jit
def part_pointers(base, first, count: tl.constexpr, WIDTH: tl.constexpr):
    """Pointers to the high parts of the tile whose first row is `first`."""
    return base + first * (3 * WIDTH) + part_offsets(count, WIDTH)


@triton.jit
def store_parts(pointers, x, WIDTH: tl.constexpr):
    """`split` of a tile, also of the largest finite numbers, whose high part is cut off instead of rounded."""
    high = x.to(tl.bfloat16)
    cut = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True).to(tl.bfloat16)
    high, middle, low = _split_below(x, tl.where(tl.abs(x) >= _LARGEST, cut, high))
    tl.store(pointers, high)
    tl.store(pointers + WIDTH, middle)
    tl.store(pointers + 2 * WIDTH, low)


@triton.jit
def load_parts(pointers, WIDTH: tl.constexpr):
    """(high, middle, low) of a tile."""
    return tl.load(pointers), tl.load(pointers + WIDTH), tl.load(pointers + 2 * WIDTH)


@triton.jit
def trans_parts(x):
    """The transpose of each part."""
    return tl.trans(x[0]), tl.trans(x[1]), tl.trans(x[2])


@triton.jit
def dot_parts(a, b, acc):
    """acc + a @ b, the smallest products first. `acc` is zeros: small products would be lost in a running sum."""
    acc = tl.dot(a[1], b[1], acc)
    acc = tl.dot(a[2], b[0], acc)
    acc = tl.dot(a[0], b[2], acc)
    acc = tl.dot(a[1], b[0], acc)
    acc = tl.dot(a[0], b[1], acc)
    return tl.dot(a[0], b[0], acc)


@triton.jit
def zeros_after(x, numbers):
    """Zeros that are there when `x` is: a product that starts from them cannot overtake the sums in `x`.

    Left alone, the compilers move the additions to a tile's sums behind the products that follow, and the registers
    hold two products at once.
    """
    return (x.to(tl.int32, bitcast=True) & (numbers.batch >> 31)).to(tl.float32, bitcast=True)


@triton.jit
def delayed(x):
    """Parts in registers, of which copies in shared memory are made no earlier than here. For NVIDIA."""
    return _delay(x[0]), _delay(x[1]), _delay(x[2])


@triton.jit
def _delay(x):
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, 2)
