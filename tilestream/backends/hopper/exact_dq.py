"""Rows of dq that are not finite, exact: `triton.backward`'s exact kernel, for flags of rows.

Launched for every backward that can hide something, and at its end soon where nothing is flagged.

Shapes: P programs of tiles of packed rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.backends.triton.backward import query_program
from tilestream.backends.triton.tiles import locate, numbers_at, tile_index

__all__ = ["exact_dq_kernel"]

# Tiles whose flags are looked at together, as in `triton.careful`.
_TOGETHER = tl.constexpr(64)


@triton.jit(do_not_specialize=["numbers"])
def exact_dq_kernel(tensors, numbers, facts: tl.constexpr):
    """dq of tiles with flagged rows, whose flags lie as lse does, behind one that says whether any of them is set."""
    if tl.load(tensors.flags) == 0:
        return
    for first in tl.range(tl.program_id(0), numbers.num_programs, _TOGETHER * tl.num_programs(0)):
        programs = first + tl.arange(0, _TOGETHER) * tl.num_programs(0)
        if tl.max(_num_flagged_rows(programs, tensors, numbers, facts), 0) != 0:
            for index in tl.range(0, _TOGETHER):
                program = first + index * tl.num_programs(0)
                if tl.max(_num_flagged_rows(program + tl.arange(0, 1), tensors, numbers, facts), 0) != 0:
                    query_program(program, tensors, numbers, facts, True)


@triton.jit
def _num_flagged_rows(programs, tensors, numbers, facts: tl.constexpr):
    """How many rows of the tiles of these programs (P) are flagged."""
    tiles, head_kv, batch, _split = tile_index(programs, numbers, facts)
    sequence, tiles = locate(tiles[:, None], head_kv[:, None], batch[:, None], tensors, numbers, facts, BY_KEYS=False)
    rows = tiles * facts.block_m + tl.arange(0, facts.block_m)[None, :]
    are_rows = (programs < numbers.num_programs)[:, None] & (rows < sequence.seqlen_q * facts.group)
    flags = tl.load(tensors.flags + 1 + numbers_at(rows, sequence, numbers, facts), are_rows, other=0)
    return tl.sum((flags != 0).to(tl.int32), 1)
