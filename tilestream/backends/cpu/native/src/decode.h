// Computes   as forward.h, where a KV head has few query rows (decoding): out = softmax(scores) V and lse.
// Algorithm  the same loop with other products: every key is used by a handful of rows only, so packing it would cost more
//            than using it, and lanes of queries would be empty. Here lanes are the head dimension: scores are dot
//            products, acc += p V.
// Schedule   a task is a (sequence, split of the keys, some KV heads). It goes through the keys four at a time, and for
//            these through its heads: in (batch, seqlen, heads, head_dim) order that is how they lie in memory, and only
//            what is read in its order is fetched ahead by the hardware (rows of one head, prefetched by hand, reached
//            60 % of the read bandwidth). Splits are merged as in the forward.
// Traffic    K and V once, which is the bound.
// On chip    a tile (rows x DECODE_N floats), the rows of Q and acc, for each head of the task.
// Limits     as the forward.
#pragma once
#include "forward.h"

static constexpr int DECODE_ROWS = NQ < 16 ? NQ : 16, DECODE_N = 64;

static AI vf join(v8 lo, v8 hi) {
#if VW == 16
  return __builtin_shufflevector(lo, hi, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#elif VW == 8
  (void)hi;
  return lo;
#else
  (void)hi;
  return __builtin_shufflevector(lo, lo, 0, 1, 2, 3);
#endif
}
// VW elements from `t` on of a row of `width`; zeros after the end.
template <class E> static AI vf load_row(const E *row, int64_t t, int64_t width) {
  if (width - t >= max64(VW, 8)) return join(load8(row + t), VW == 16 ? load8(row + t + 8) : (v8){});
  return join(load8(row + t, width - t), VW == 16 && width - t > 8 ? load8(row + t + 8, width - t - 8) : (v8){});
}
template <class E> static AI vf load_whole(const E *at) { return join(load8(at), VW == 16 ? load8(at + 8) : (v8){}); }
#if VW == 16
static AI vf load_whole(const f32 *at) { return load((const float *)at); }
static AI vf load_whole(const bf16 *at) {
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at)), 16);
}
static AI vf load_whole(const f16 *at) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at)); }
#elif VW == 4
static AI vf load_whole(const f32 *at) { return load((const float *)at); }
static AI vf load_whole(const bf16 *at) { return load_row(at, 0, 4); }
static AI vf load_whole(const f16 *at) { return load_row(at, 0, 4); }
#endif
typedef float v4 __attribute__((vector_size(16)));
static AI v4 quarter_sums(vf x) {  // four numbers with the sum of x
#if VW == 16
  const v8 half = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
#elif VW == 8
  const v8 half = x;
#endif
#if VW == 4
  return x;
#else
  return __builtin_shufflevector(half, half, 0, 1, 2, 3) + __builtin_shufflevector(half, half, 4, 5, 6, 7);
#endif
}
// The sums of four vectors.
static AI v4 sums_of(const vf *x) {
  const v4 a = quarter_sums(x[0]), b = quarter_sums(x[1]), c = quarter_sums(x[2]), d = quarter_sums(x[3]);
  const v4 ab = __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const v4 cd = __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}
static AI float sum_of(vf x) {
  const v4 q = quarter_sums(x);
  return (q[0] + q[1]) + (q[2] + q[3]);
}
static AI float maximum_of(vf x) {
  float top = x[0];
  for (int i = 1; i < VW; i++) top = x[i] > top ? x[i] : top;
  return top;
}
struct DecodeHead {
  Task task;
  Panel panel;
  Softmax state;
  alignas(64) float alpha[NQ];
  float *q, *acc, *tile;  // [row][width padded to vectors] twice, [row][key]
};

template <class E> struct DecodeTask {
  const Forward *f;
  const Call *c;
  DecodeHead *heads;
  float *lanes, *extra;  // tiles [key][row] for what score.h does; bias or dropout factors
  int64_t num_heads, rows, q_stride, acc_stride;
  Sequence sequence;

  static int64_t num_tasks(const Forward &f) {
    const Call &c = *f.plan.call;
    return c.batch * f.plan.splits * ((c.num_heads_kv + f.heads_at_once - 1) / f.heads_at_once);
  }
  char *lay_out(char *at) {
    q_stride = round_up(c->head_dim, VW), acc_stride = round_up(c->head_dim_v, VW);
    take(&at, f->heads_at_once * (int64_t)sizeof(DecodeHead), &heads);
    take(&at, DECODE_N * NQ * 4, &lanes);
    take(&at, DECODE_N * NQ * 4, &extra);
    for (int64_t h = 0; h < f->heads_at_once; h++) {
      float *q, *acc, *tile;
      take(&at, f->plan.block_rows * q_stride * 4, &q);
      take(&at, f->plan.block_rows * acc_stride * 4, &acc);
      take(&at, f->plan.block_rows * DECODE_N * 4, &tile);
      if (heads) heads[h].q = q, heads[h].acc = acc, heads[h].tile = tile;
    }
    return at;
  }
  void choose(int64_t index) {
    const int64_t split = index % f->plan.splits, groups = (c->num_heads_kv + f->heads_at_once - 1) / f->heads_at_once;
    index /= f->plan.splits;
    sequence = sequence_of(*c, index / groups);
    rows = sequence.num_queries * f->plan.group;
    const int64_t first = index % groups * f->heads_at_once;
    num_heads = min64(f->heads_at_once, c->num_heads_kv - first);
    for (int64_t h = 0; h < num_heads; h++) heads[h].task = {sequence, first + h, 0, rows, 0, split};
  }
  void start(DecodeHead &head) {
    panel_of(*c, head.task, f->plan.group, 0, rows, &head.panel);
    start_softmax(*c, head.task, head.panel, &head.state);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t t = 0; t < q_stride; t += VW)
        store(head.q + r * q_stride + t, load_row((const E *)head.panel.query_rows[r], t, c->head_dim) * f->scoring.sign);
    memset(head.acc, 0, (size_t)(rows * acc_stride * 4));
  }
  // tile[row][key] = K q for R rows from `row` on and four keys
  template <int R> void scores(const DecodeHead &head, const E *const *k, int64_t key, int64_t row) {
    const float *queries = head.q + row * q_stride;
    const int64_t whole = c->head_dim / VW * VW;
    vf sum[R][4] = {};
    for (int64_t t = 0; t < whole; t += VW)
      UNROLL for (int j = 0; j < 4; j++) {
        const vf x = load_whole(k[j] + t);
        UNROLL for (int r = 0; r < R; r++) sum[r][j] += load(queries + r * q_stride + t) * x;
      }
    if (whole < c->head_dim)
      UNROLL for (int j = 0; j < 4; j++) {
        const vf x = load_row(k[j], whole, c->head_dim);
        UNROLL for (int r = 0; r < R; r++) sum[r][j] += load(queries + r * q_stride + whole) * x;
      }
    UNROLL for (int r = 0; r < R; r++) *(v4_any *)(head.tile + (row + r) * DECODE_N + key) = sums_of(sum[r]);
  }
  // acc[row][column] += P V for R rows, C vectors of columns and four keys
  template <int R, int C> void accumulate_columns(const DecodeHead &head, const E *const *v, int64_t key, int64_t row,
                                                  int64_t column) {
    vf sum[R][C];
    float *acc = head.acc + row * acc_stride + column;
    const float *p = head.tile + row * DECODE_N + key;
    const bool is_whole = column + C * VW <= c->head_dim_v;
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int e = 0; e < C; e++) sum[r][e] = load(acc + r * acc_stride + e * VW);
    UNROLL for (int j = 0; j < 4; j++) UNROLL for (int e = 0; e < C; e++) {
      const vf x = is_whole ? load_whole(v[j] + column + e * VW) : load_row(v[j], column + e * VW, c->head_dim_v);
      UNROLL for (int r = 0; r < R; r++) sum[r][e] += splat(p[r * DECODE_N + j]) * x;
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int e = 0; e < C; e++) store(acc + r * acc_stride + e * VW, sum[r][e]);
  }
  template <int R> void accumulate(const DecodeHead &head, const E *const *v, int64_t key, int64_t row) {
    int64_t column = 0;
    for (; column + 4 * VW <= c->head_dim_v; column += 4 * VW) accumulate_columns<R, 4>(head, v, key, row, column);
    for (; column < c->head_dim_v; column += VW) accumulate_columns<R, 1>(head, v, key, row, column);
  }
  // Softmax of plain scores, along the keys: tile becomes weights.
  void soften_rows(DecodeHead &head, int64_t k0, int64_t n) {
    for (int64_t r = 0; r < rows; r++) {
      float *s = head.tile + r * DECODE_N;
      const int64_t i = head.panel.i_of(r);
      const Span seen = key_span(*c, sequence, i, i + 1);
      for (int64_t key = 0; key < min64(n, seen.lo - k0); key++) s[key] = -INFINITY;
      for (int64_t key = max64(0, min64(n, seen.hi - k0)); key < DECODE_N; key++) s[key] = -INFINITY;
      vf top = load(s);
      for (int64_t key = VW; key < DECODE_N; key += VW) top = maximum(top, load(s + key));
      const float old = head.state.row_max[r], fresh = fmaxf(old, maximum_of(top) * f->scoring.factor);
      const float finite = fresh == -INFINITY ? 0.f : fresh;
      vf sum = {};
      for (int64_t key = 0; key < DECODE_N; key += VW) {
        const vf p = exp2_of<sizeof(E) == 4>(load(s + key) * f->scoring.factor - finite);
        sum += p;
        store(s + key, p);
      }
      head.alpha[r] = exp2f(old - finite);
      head.state.row_max[r] = fresh;
      head.state.row_sum[r] = head.state.row_sum[r] * head.alpha[r] + sum_of(sum);
    }
  }
  // The same for any scores, with the rows in lanes, as score.h has it.
  void soften_lanes(DecodeHead &head, int64_t k0, int64_t n) {
    const Scoring &s = f->scoring;
    alignas(64) float tile_max[NQ], subtrahend[NQ];
    memset(lanes, 0, (size_t)(n * NQ * 4));
    for (int64_t r = 0; r < rows; r++)
      for (int64_t key = 0; key < n; key++) lanes[key * NQ + r] = head.tile[r * DECODE_N + key];
    const bool is_partial = !is_full(*c, sequence, head.panel.i_lo, head.panel.i_hi, k0, k0 + n);
    score_tile(*c, s, head.panel, sequence, lanes, k0, n, is_partial, extra, 0, tile_max);
    const float factor = s.is_plain ? s.factor : 1.f;
    raise_max(&head.state, tile_max, factor, subtrahend, head.alpha);
    exponentials<sizeof(E) == 4>(lanes, n, factor, subtrahend, head.state.row_sum);
    if (s.has_dropout) dropout_tile(*c, 1.f, head.panel, sequence, k0, n, extra);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t key = 0; key < DECODE_N; key++)
        head.tile[r * DECODE_N + key] =
            key < n ? lanes[key * NQ + r] * (s.has_dropout ? extra[key * NQ + r] : 1.f) : 0.f;
  }
  void soften(DecodeHead &head, int64_t k0, int64_t n) {
    if (f->scoring.is_plain && !f->scoring.has_dropout) soften_rows(head, k0, n);
    else soften_lanes(head, k0, n);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t t = 0; head.alpha[r] != 1.f && t < acc_stride; t += VW)
        store(head.acc + r * acc_stride + t, load(head.acc + r * acc_stride + t) * head.alpha[r]);
  }
  // Rows of four keys of one head; the last key stands in for those beyond the end, whose weights are 0.
  void four_rows(const char *base, const int64_t *strides, const Task &task, int64_t j, int64_t end, const E **at) const {
    for (int64_t i = 0; i < 4; i++) at[i] = (const E *)key_row(*c, base, strides, task, min64(j + i, end - 1));
  }
  void fold(int64_t k0, int64_t n) {
    const E *at[4];
    for (int64_t key = 0; key < n; key += 4)
      for (int64_t h = 0; h < num_heads; h++) {
        four_rows(c->key, c->key_strides, heads[h].task, k0 + key, k0 + n, at);
        int64_t row = 0;
        for (; row + 4 <= rows; row += 4) scores<4>(heads[h], at, key, row);
        for (; row < rows; row++) scores<1>(heads[h], at, key, row);
      }
    for (int64_t h = 0; h < num_heads; h++) soften(heads[h], k0, n);
    for (int64_t key = 0; key < n; key += 4)
      for (int64_t h = 0; h < num_heads; h++) {
        four_rows(c->value, c->value_strides, heads[h].task, k0 + key, k0 + n, at);
        int64_t row = 0;
        for (; row + 4 <= rows; row += 4) accumulate<4>(heads[h], at, key, row);
        for (; row < rows; row++) accumulate<1>(heads[h], at, key, row);
      }
  }
  bool run() {
    if (rows == 0) return true;
    for (int64_t h = 0; h < num_heads; h++) start(heads[h]);
    const Span span = task_keys(*c, f->plan, heads[0].task, 0, sequence.num_queries, DECODE_N);
    for (int64_t k0 = span.lo - span.lo % DECODE_N; k0 < span.hi; k0 += DECODE_N) {
      const int64_t lo = max64(k0, span.lo / KEY_UNIT * KEY_UNIT);
      fold(lo, min64(k0 + DECODE_N, span.hi) - lo);
    }
    bool is_finite = true;
    for (int64_t h = 0; h < num_heads; h++) is_finite &= finish(heads[h]);
    return is_finite;
  }
  bool finish(const DecodeHead &head) {
    bool is_finite = true;
    for (int64_t l = 0; l < rows; l++) {
      const int64_t i = head.panel.i_of(l), q_head = head.panel.head[l];
      const float *sum = head.acc + l * acc_stride;
      float check = 0;
      for (int64_t t = 0; t < c->head_dim_v; t++) check += sum[t] * 0.f;
      is_finite &= finish_row(*f, head.task, i, q_head, head.state.row_max[l], head.state.row_sum[l]) & (check == 0.f);
      if (f->parts) {
        memcpy(part_of(*f, head.task, i, q_head) + 2, sum, (size_t)c->head_dim_v * 4);
        continue;
      }
      const float factor = head.state.row_sum[l] > 0 ? f->scoring.keep_factor / head.state.row_sum[l] : 0.f;
      E *out = (E *)query_row(*c, c->out, c->out_strides, head.task, i, q_head);
      for (int64_t t = 0; t < c->head_dim_v; t += 8) {
        v8 x = {};
        for (int64_t e = 0; e < min64(8, c->head_dim_v - t); e++) x[e] = sum[t + e] * factor;
        store8(out + t, x, c->head_dim_v - t);
      }
    }
    return is_finite;
  }
};
