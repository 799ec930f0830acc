"""Rows of the Hopper kernels that are not finite, exact: `triton`'s exact kernels, for flags of rows.

Launched for every call that can hide something, and at their end soon where nothing is flagged; that of the forward is
launched before the forward ends.

Shapes: P programs of tiles of packed rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from tilestream.backends.triton.backward import query_program
from tilestream.backends.triton.careful import FLAGS, first_of, num_rounds
from tilestream.backends.triton.configs import Config
from tilestream.backends.triton.forward import exact_program
from tilestream.backends.triton.tiles import locate, numbers_at, tile_index

__all__ = ["EXACT_CONFIG", "exact_dq_kernel", "exact_rows_kernel", "for_flagged_rows"]

# Small, so that nothing is in local memory, and compiled soon.
EXACT_CONFIG = Config(32, 16, 8, 1)
# At most, before the flags of rows.
_FLAGGERS = tl.constexpr(1024)


@triton.jit(do_not_specialize=["numbers"])
def exact_rows_kernel(tensors, numbers, facts: tl.constexpr):
    """out of tiles with flagged rows."""
    # It was launched early (`Config.starts_early`).
    gdc_wait()
    for_flagged_rows(exact_program, tensors, numbers, facts)


@triton.jit(do_not_specialize=["numbers"])
def exact_dq_kernel(tensors, numbers, facts: tl.constexpr):
    """dq of tiles with flagged rows."""
    for_flagged_rows(_exact_dq, tensors, numbers, facts)


@triton.jit
def _exact_dq(program, tensors, numbers, facts: tl.constexpr):
    query_program(program, tensors, numbers, facts, True)


@triton.jit
def for_flagged_rows(PROGRAM: tl.constexpr, tensors, numbers, facts: tl.constexpr):
    """`PROGRAM` of tiles with flagged rows: of kernels whose rows are not packed.

    Their flags lie as lse does, behind `num_flaggers` others; where none of these is set, none of those is.
    """
    are_set = tl.arange(0, _FLAGGERS) < numbers.num_flaggers
    if tl.max(tl.load(tensors.flags + tl.arange(0, _FLAGGERS), are_set, other=0), 0) == 0:
        return
    for round_index in tl.range(0, num_rounds(numbers)):
        first = first_of(round_index)
        programs = first + tl.arange(0, FLAGS) * tl.num_programs(0)
        if tl.max(_num_flagged_rows(programs, tensors, numbers, facts), 0) != 0:
            for index in tl.range(0, FLAGS):
                program = first + index * tl.num_programs(0) + tl.arange(0, 1)
                if tl.max(_num_flagged_rows(program, tensors, numbers, facts), 0) != 0:
                    PROGRAM(first + index * tl.num_programs(0), tensors, numbers, facts)


@triton.jit
def _num_flagged_rows(programs, tensors, numbers, facts: tl.constexpr):
    """How many rows of the tiles of these programs (P) are flagged."""
    tiles, head_kv, batch, _split = tile_index(programs, numbers, facts)
    sequence, tiles = locate(tiles[:, None], head_kv[:, None], batch[:, None], tensors, numbers, facts, BY_KEYS=False)
    rows = tiles * facts.block_m + tl.arange(0, facts.block_m)[None, :]
    are_rows = (programs < numbers.num_programs)[:, None] & (rows < sequence.seqlen_q * facts.group)
    places = numbers.num_flaggers + numbers_at(rows, sequence, numbers, facts)
    flags = tl.load(tensors.flags + places, are_rows, other=0)
    return tl.sum((flags != 0).to(tl.int32), 1)
