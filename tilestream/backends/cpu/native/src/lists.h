// The tiles that a block mask keeps of a task's rows (tilestream/block_mask/tiles.py), as pieces of blocks of keys.
//
// A kernel's block of keys is gathered: it holds keys of as many tiles as fill it, wherever those lie, because packing
// reads each key by its own address. EMPTY tiles are never looked at; a PARTIAL one is taken a word of its bits at a time,
// so that a panel is masked where it has to be and left out where it sees nothing.
#pragma once
#include "score.h"

struct Piece {
  int64_t k0, n, at;      // keys [k0, k0 + n) are rows [at, at + n) of the block; k0 is a multiple of 4, and whole UNITs
                          // from where its tile begins
  const uint32_t *bits;   // of these keys: the word of the tile's first query; null: no pair is hidden by the mask
  int64_t entry, column;  // of the lists
  bool begins, ends;      // the first, the last piece of its tile
};
static constexpr int64_t WORD = 32, UNIT = 8;  // keys: of a word; rows of the widest panel of packed keys
// What a block has room for. Tiles of 32 keys or more have no more pieces, unless a band hides them.
template <int CAPACITY> static constexpr int MAX_PIECES = CAPACITY / 16 + 4;

// What a panel sees of a piece.
enum Kind { EMPTY, PARTIAL, FULL };
struct Look {
  Kind kind;
  bool is_masked;  // by bits: bit k of shown[lane] says whether that row sees key k of the piece
  alignas(64) int32_t shown[NQ];
};

static int64_t num_planes(const Call &c) {
  return (c.lists->plane_strides[0] ? c.batch : 1) * (c.lists->plane_strides[1] ? c.num_heads_q : 1);
}
// Kept tiles of all planes.
static int64_t num_listed(const Call &c) { return c.lists->offsets[num_planes(c) * c.lists->num_rows]; }
// How much of a call's area they are.
static double kept_fraction(const Call &c) {
  const double all = (double)num_planes(c) * (double)c.seqlen_q * (double)c.seqlen_k;
  const double kept = (double)num_listed(c) * (double)(c.lists->tile_m * c.lists->tile_n);
  return all > 0 ? fmin(1., kept / all) : 0;
}

struct Gather {
  const Lists *lists;
  int64_t i_lo, num_keys;  // the first query of the row of tiles; keys of the sequence
  Span seen;               // keys that a packed call's band shows to some query of the row of tiles
  bool is_sorted;          // tiles from left to right, whatever they are; else PARTIAL ones first
  int64_t partial, partial_end, full, full_end;  // entries [partial, partial_end) and [full, full_end) are left
  int64_t entry, next, end;                      // the tile in work, and its keys [next, end) that are left

  void start(const Call &c, const Task &t, int64_t group, bool sorted) {
    lists = c.lists, is_sorted = sorted;
    const int64_t tile_row = t.row_lo / group / lists->tile_m;
    const int32_t *range = lists->offsets + first_list(*lists, t.sequence.batch, t.first_head) + tile_row;
    int64_t lo = range[0], hi = range[1];
    partial = lo, full_end = hi;
    while (lo < hi) {  // the first FULL one
      const int64_t mid = (lo + hi) / 2;
      if (lists->patterns[mid] < 0) hi = mid; else lo = mid + 1;
    }
    partial_end = full = lo;
    i_lo = tile_row * lists->tile_m;
    num_keys = t.sequence.num_keys;
    seen = key_span(c, t.sequence, i_lo, min64(i_lo + lists->tile_m, t.sequence.num_queries));
    next = end = 0;
  }
  int64_t words() const { return (lists->tile_n + WORD - 1) / WORD; }
  // The next tile of the sequence; false after the last.
  bool advance() {
    for (;;) {
      const bool has_partial = partial < partial_end, has_full = full < full_end;
      if (!has_partial && !has_full) return false;
      const bool takes_partial = has_partial && (!has_full || !is_sorted || lists->columns[partial] < lists->columns[full]);
      entry = takes_partial ? partial++ : full++;
      next = lists->columns[entry] * lists->tile_n;
      end = min64(next + lists->tile_n, num_keys);
      if (next < end) return true;
    }
  }
  // The pieces of the next block of up to `capacity` keys, and their number; 0 after the last. A tile that the band hides
  // is a piece without keys.
  int64_t next_block(int64_t capacity, int64_t most, Piece *pieces) {
    int64_t num = 0, at = 0;
    while (num < most && (next < end || advance())) {
      const int64_t first = lists->columns[entry] * lists->tile_n, pattern = lists->patterns[entry];
      Piece *piece = pieces + num;
      *piece = {next, 0, at, 0, entry, lists->columns[entry], next == first, true};
      if (end <= seen.lo || first >= seen.hi) {
        next = end, num++;
        continue;
      }
      const int64_t word = (next - first) / WORD, wanted = pattern < 0 ? end - next : min64(end - next, WORD);
      const int64_t room = wanted <= capacity - at ? wanted : (capacity - at) / UNIT * UNIT;
      if (room < (pattern < 0 ? min64(wanted, UNIT) : wanted)) break;
      piece->n = min64(wanted, room);
      if (pattern >= 0) piece->bits = lists->bits + pattern * lists->tile_m * words() + word;
      next += piece->n, at += piece->n, num++;
      piece->ends = next == end;
    }
    return num;
  }
  // How many pieces it takes to hold what a panel sees, and what it sees of each; `is_masked`: not all that they hold.
  int64_t look_at(const Call &c, const Sequence &s, const Panel &panel, const Piece *pieces, int64_t num, Look *looks,
                  bool *is_masked) const {
    int64_t seen = 0;
    for (int64_t x = 0; x < num; x++) {
      const Kind kind = looks[x].kind = look(c, s, panel, pieces[x], &looks[x]);
      if (kind != EMPTY) seen = x + 1;
    }
    *is_masked = false;
    for (int64_t x = 0; x < seen; x++) *is_masked |= looks[x].kind != FULL && pieces[x].n > 0;
    return seen;
  }

 private:
  Kind look(const Call &c, const Sequence &s, const Panel &panel, const Piece &piece, Look *to) const {
    const Span band = key_span(c, s, panel.i_lo, panel.i_hi);
    to->is_masked = true;
    if (piece.k0 >= band.hi || piece.k0 + piece.n <= band.lo) {
      memset(to->shown, 0, sizeof(to->shown));
      return EMPTY;
    }
    const bool is_cut = !is_full(c, s, panel.i_lo, panel.i_hi, piece.k0, piece.k0 + piece.n);
    if (!piece.bits) {
      to->is_masked = false;
      return piece.n == 0 ? EMPTY : is_cut ? PARTIAL : FULL;
    }
    const uint32_t *first = piece.bits + (panel.i_lo - i_lo) * words();
    const uint32_t exists = piece.n >= WORD ? ~0u : (1u << piece.n) - 1;
    uint32_t any = 0, all = exists;
    for (int64_t l = 0; l < NQ; l++) {
      const uint32_t word = first[panel.i_offset[l] * words()] & exists;
      any |= word, all &= word, to->shown[l] = (int32_t)word;
    }
    to->is_masked = all != exists;
    return !any ? EMPTY : all == exists && !is_cut ? FULL : PARTIAL;
  }
};
