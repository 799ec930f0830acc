// What a call is cut into: sequences, packed query rows, key blocks, tasks. The same positions as tilestream/tiles.py.
#pragma once
#include <stdlib.h>
#include "call.h"
#include "simd.h"

// Rows of a task are the query rows of one KV head: row r is query r / group of query head kv_head * group + r % group.
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

// Tasks: (sequence, block of rows, KV head, split of the keys), late rows first, because those are the long ones under a
// causal band. `first` holds each sequence's first task.
struct Task {
  Sequence sequence;
  int64_t kv_head, row_lo, row_hi, row_block, split;
};
struct Plan {
  const Call *call;
  int64_t group, block_rows, splits, num_tasks;
  int64_t *first;  // (batch + 1,); null where all sequences are alike
  bool units_outside;  // tasks of one (sequence, KV head) are neighbours, rather than those of one block of rows
  int not_finite;      // set by any task

  int64_t blocks_of(int64_t num_queries) const { return (num_queries * group + block_rows - 1) / block_rows; }
  bool lay_out() {
    const Call &c = *call;
    first = 0;
    if (!c.cu_seqlens_q) {
      num_tasks = c.batch * blocks_of(c.seqlen_q) * c.num_heads_kv * splits;
      return true;
    }
    first = (int64_t *)malloc((size_t)(c.batch + 1) * sizeof(int64_t));
    if (!first) return false;
    num_tasks = 0;
    for (int64_t b = 0; b < c.batch; b++) {
      first[b] = num_tasks;
      num_tasks += blocks_of(c.cu_seqlens_q[b + 1] - c.cu_seqlens_q[b]) * c.num_heads_kv * splits;
    }
    first[c.batch] = num_tasks;
    return true;
  }
  Task task(int64_t index) const {
    const Call &c = *call;
    Task t;
    int64_t blocks, b;
    if (!first) {  // dense: blocks outermost, so that neighbours in time belong to different heads
      blocks = blocks_of(c.seqlen_q);
      t.split = index % splits;
      index /= splits;
      const int64_t units = c.batch * c.num_heads_kv;
      const int64_t unit = units_outside ? index / blocks : index % units;
      index = units_outside ? index % blocks : index / units;
      t.kv_head = unit % c.num_heads_kv;
      b = unit / c.num_heads_kv;
    } else {
      int64_t lo = 0, hi = c.batch;  // the last sequence whose first task is <= index; it has tasks
      while (hi - lo > 1) {
        const int64_t mid = (lo + hi) / 2;
        if (first[mid] <= index) lo = mid; else hi = mid;
      }
      b = lo;
      index -= first[b];
      blocks = blocks_of(c.cu_seqlens_q[b + 1] - c.cu_seqlens_q[b]);
      t.split = index % splits;
      index /= splits;
      t.kv_head = units_outside ? index / blocks : index % c.num_heads_kv;
      index = units_outside ? index % blocks : index / c.num_heads_kv;
    }
    t.sequence = sequence_of(c, b);
    t.row_block = blocks - 1 - index;
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
