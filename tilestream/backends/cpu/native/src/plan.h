// What a call is cut into: sequences, packed query rows, key blocks, tasks. The same positions as tilestream/tiles.py.
#pragma once
#include <stdlib.h>
#include "call.h"
#include "simd.h"

// Rows of a task are the query rows of one KV head: row r is query r / group of query head first_head + r % group.
struct Sequence {
  int64_t batch, query_start, key_start, num_queries, num_keys, shift;
};
struct Span {
  int64_t lo, hi;  // [lo, hi); lo == hi: nothing
};

static AI Sequence sequence_of(const Call &c, int64_t b) {
  if (!c.cu_seqlens_q) return {b, 0, 0, c.seqlen_q, c.seqlen_k, c.shift};
  const int64_t queries = c.cu_seqlens_q[b + 1] - c.cu_seqlens_q[b], keys = c.cu_seqlens_k[b + 1] - c.cu_seqlens_k[b];
  return {b, c.cu_seqlens_q[b], c.cu_seqlens_k[b], queries, keys, keys - queries};
}
// Where a task starts among the keys: always a multiple, so that sums over keys that are taken in groups (16 lanes, 32 rows
// of a tile) are grouped alike however many rows a task has.
static constexpr int64_t KEY_UNIT = 32;
// Keys that at least one query of [i_lo, i_hi) sees.
static AI Span key_span(const Call &c, const Sequence &s, int64_t i_lo, int64_t i_hi) {
  const int64_t lo = c.left >= NO_LIMIT ? 0 : max64(0, i_lo + s.shift - c.left);
  const int64_t hi = c.right >= NO_LIMIT ? s.num_keys : min64(s.num_keys, i_hi + s.shift + c.right);
  return lo < hi ? Span{lo, hi} : Span{0, 0};
}
// Queries that see at least one key of [j_lo, j_hi).
static AI Span query_span(const Call &c, const Sequence &s, int64_t j_lo, int64_t j_hi) {
  const int64_t lo = c.right >= NO_LIMIT ? 0 : max64(0, j_lo - s.shift - c.right);
  const int64_t hi = c.left >= NO_LIMIT ? s.num_queries : min64(s.num_queries, j_hi - s.shift + c.left);
  return lo < hi ? Span{lo, hi} : Span{0, 0};
}
// Whether every query of [i_lo, i_hi) sees every key of [j_lo, j_hi).
static AI bool is_full(const Call &c, const Sequence &s, int64_t i_lo, int64_t i_hi, int64_t j_lo, int64_t j_hi) {
  return (c.right >= NO_LIMIT || j_hi - 1 - (i_lo + s.shift) <= c.right) &&
         (c.left >= NO_LIMIT || j_lo - (i_hi - 1 + s.shift) >= -c.left);
}

// The first row of tiles of a plane.
static AI int64_t first_list(const Lists &lists, int64_t batch, int64_t head) {
  return (batch * lists.plane_strides[0] + head * lists.plane_strides[1]) * lists.num_rows;
}

// Tasks: (sequence, block of rows, KV head, split of the keys), late rows first, because those are the long ones under a
// causal band; with a block mask those with most tiles. `first` holds each sequence's first task.
struct Task {
  Sequence sequence;
  int64_t kv_head, first_head, row_lo, row_hi, row_block, split;
};
struct Plan {
  const Call *call;
  int64_t group, block_rows, splits, num_tasks;
  int64_t capacity;    // rows that a task has room for: whole panels
  int64_t members;     // parts of a KV head's query heads, each with tasks of its own; `group` is of one part
  int64_t *first;      // (batch + 1,); null where all sequences are alike
  bool units_outside;  // tasks of one (sequence, KV head) are neighbours, rather than those of one block of rows
  bool in_one_order;   // all members of a unit, and packed sequences of all lengths, go through their rows of tiles alike
  int not_finite;      // set by any task

  void pack_heads(const Call &c) {
    const int64_t all = c.num_heads_q / c.num_heads_kv;
    call = &c, group = c.lists ? c.lists->packed_heads : all, members = all / group;
  }
  // With a block mask a block lies within one row of its tiles, so the last ones may hold no row.
  int64_t blocks_of(int64_t num_queries) const {
    if (call->lists) return (num_queries + call->lists->tile_m - 1) / call->lists->tile_m * parts();
    return (num_queries * group + block_rows - 1) / block_rows;
  }
  int64_t parts() const { return call->lists->tile_m * group / block_rows; }  // blocks of a row of tiles
  // The k-th block of rows: late ones first, or those with most tiles.
  int64_t block_at(int64_t k, int64_t blocks, int64_t batch, int64_t head) const {
    const Lists *lists = call->lists;
    if (lists && !first && !(in_one_order && lists->plane_strides[1]))
      return lists->order[first_list(*lists, batch, head) + k / parts()] * parts() + k % parts();
    return lists && in_one_order ? k : blocks - 1 - k;
  }
  bool lay_out() {
    const Call &c = *call;
    first = 0;
    if (!c.cu_seqlens_q) {
      num_tasks = c.batch * blocks_of(c.seqlen_q) * c.num_heads_kv * members * splits;
      return true;
    }
    first = (int64_t *)malloc((size_t)(c.batch + 1) * sizeof(int64_t));
    if (!first) return false;
    num_tasks = 0;
    for (int64_t b = 0; b < c.batch; b++) {
      first[b] = num_tasks;
      num_tasks += blocks_of(c.cu_seqlens_q[b + 1] - c.cu_seqlens_q[b]) * c.num_heads_kv * members * splits;
    }
    first[c.batch] = num_tasks;
    return true;
  }
  Task task(int64_t index) const {
    const Call &c = *call;
    Task t;
    int64_t b = 0, num_queries = c.seqlen_q;
    if (first) {
      int64_t hi = c.batch;  // the last sequence whose first task is <= index; it has tasks
      while (hi - b > 1) {
        const int64_t mid = (b + hi) / 2;
        if (first[mid] <= index) b = mid; else hi = mid;
      }
      index -= first[b];
      num_queries = c.cu_seqlens_q[b + 1] - c.cu_seqlens_q[b];
    }
    const int64_t blocks = blocks_of(num_queries);
    t.split = index % splits;
    index /= splits;
    int64_t unit, member;  // a unit is a KV head, of all batch entries where sequences are alike
    if (units_outside) {
      unit = index / (blocks * members), index %= blocks * members;
      member = index % members, index /= members;
    } else {  // blocks outermost, so that neighbours in time belong to different heads
      const int64_t parts_of_heads = (first ? 1 : c.batch) * c.num_heads_kv * members;
      unit = index % parts_of_heads / members, member = index % members, index /= parts_of_heads;
    }
    if (!first) b = unit / c.num_heads_kv;
    t.kv_head = unit % c.num_heads_kv;
    t.first_head = (t.kv_head * members + member) * group;
    t.sequence = sequence_of(c, b);
    t.row_block = block_at(index, blocks, b, t.first_head);
    t.row_lo = t.row_block * block_rows;
    t.row_hi = min64(t.row_lo + block_rows, t.sequence.num_queries * group);
    return t;
  }
};

// One row of a (batch, token, head) tensor with a contiguous last dimension.
static AI int64_t row_offset(const int64_t *strides, int64_t batch, int64_t token, int64_t head, bool is_packed) {
  return (is_packed ? 0 : batch * strides[0]) + token * strides[1] + head * strides[2];
}
static AI const char *key_row(const Call &c, const char *base, const int64_t *strides, const Task &t, int64_t j) {
  return base + size_of_dtype(c.dtype) * row_offset(strides, t.sequence.batch, t.sequence.key_start + j, t.kv_head,
                                                   c.cu_seqlens_k != 0);
}
// The rows of keys [j, j + n).
static AI void key_rows(const Call &c, const char *base, const int64_t *strides, const Task &t, int64_t j, int64_t n,
                        const char **rows) {
  const char *row = key_row(c, base, strides, t, j);
  for (int64_t i = 0; i < n; i++, row += size_of_dtype(c.dtype) * strides[1]) rows[i] = row;
}
static AI char *query_row(const Call &c, const char *base, const int64_t *strides, const Task &t, int64_t i, int64_t head) {
  return (char *)base + size_of_dtype(c.dtype) * row_offset(strides, t.sequence.batch, t.sequence.query_start + i, head,
                                                            c.cu_seqlens_q != 0);
}
// Index of a row in lse and delta: (batch, head, token), or (head, token) where packed.
static AI int64_t lse_index(const Call &c, const int64_t *strides, int64_t token_stride, const Task &t, int64_t i,
                            int64_t head) {
  return (c.cu_seqlens_q ? 0 : t.sequence.batch * strides[0]) + head * strides[1] +
         (t.sequence.query_start + i) * token_stride;
}
