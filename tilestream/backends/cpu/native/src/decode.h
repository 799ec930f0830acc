// Computes   as forward.h, where a KV head has few query rows (decoding): out = softmax(scores) V and lse.
// Algorithm  the same loop with other products: every key is used by a handful of rows only, so packing it would cost more
//            than using it, and lanes of queries would be empty. Here lanes are the head dimension: scores are dot
//            products, acc += p V.
// Schedule   a task is a (sequence, KV head, split of the keys), 64 keys at a time; splits are merged as in the forward.
//            Rows of one head lie apart in memory, which the hardware does not fetch ahead, so each row asks for the one
//            64 further on. (Going through all heads of a key, in the order of memory, was slower: 48 instead of 64 % of
//            the read bandwidth in bfloat16.)
// Traffic    K and V once, which is the bound.
// On chip    a tile (rows x DECODE_N floats), the rows of Q and acc.
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
  float part[VW], top;
  store(part, x);
  for (int width = VW / 2; width >= 4; width /= 2)  // halves onto each other: vectors as long as there are any
    for (int i = 0; i < width; i++) part[i] = part[i] > part[i + width] ? part[i] : part[i + width];
  top = part[0] > part[1] ? part[0] : part[1];
  const float other = part[2] > part[3] ? part[2] : part[3];
  return top > other ? top : other;
}
static AI void prefetch(const char *at, int64_t bytes) {
  for (int64_t offset = 0; offset < bytes; offset += 64) __builtin_prefetch(at + offset, 0, 2);
}

template <class E> struct DecodeTask {
  static constexpr bool SHARES_TILES = false;
  const Forward *f;
  const Call *c;
  Task task;
  Panel *panel;
  Softmax *state;
  float *q, *acc, *tile;  // [row][width padded to vectors] twice, [row][key]
  float *lanes, *extra;   // tiles [key][row] for what score.h does; bias or dropout factors
  int64_t rows, q_stride, acc_stride;
  int64_t key_step, value_step;  // bytes from a block of keys to the next
  alignas(64) float alpha[NQ];

  char *lay_out(char *at) {
    q_stride = round_up(c->head_dim, VW), acc_stride = round_up(c->head_dim_v, VW < 8 ? 8 : VW);
    take(&at, (int64_t)sizeof(Panel), &panel);
    take(&at, (int64_t)sizeof(Softmax), &state);
    take(&at, DECODE_ROWS * q_stride * 4, &q);
    take(&at, DECODE_ROWS * acc_stride * 4, &acc);
    take(&at, DECODE_ROWS * DECODE_N * 4, &tile);
    take(&at, DECODE_N * NQ * 4, &lanes);
    take(&at, DECODE_N * NQ * 4, &extra);
    return at;
  }
  void start() {
    rows = task.row_hi - task.row_lo;
    key_step = DECODE_N * c->key_strides[1] * (int64_t)sizeof(E);
    value_step = DECODE_N * c->value_strides[1] * (int64_t)sizeof(E);
    panel_of(*c, task, f->plan.group, task.row_lo, task.row_hi, panel);
    start_softmax(*f, task, *panel, state);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t t = 0; t < q_stride; t += VW)
        store(q + r * q_stride + t, load_row((const E *)panel->query_rows[r], t, c->head_dim) * f->scoring.sign);
    memset(acc, 0, (size_t)(rows * acc_stride * 4));
  }
  // tile[row][key] = K q for R rows from `row` on and four keys
  template <int R> void scores(const E *const *k, int64_t key, int64_t row) {
    const float *queries = q + row * q_stride;
    const int64_t whole = c->head_dim / VW * VW;
    vf sum[R][4] = {};
    UNROLL for (int j = 0; j < 4; j++) prefetch((const char *)k[j] + key_step, c->head_dim * (int64_t)sizeof(E));
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
    UNROLL for (int r = 0; r < R; r++) *(v4_any *)(tile + (row + r) * DECODE_N + key) = sums_of(sum[r]);
  }
  // acc[row][column] = alpha * acc + P V for R rows, C vectors of columns and n keys
  template <int R, int C> void accumulate_columns(const E *const *v, int64_t n, int64_t row, int64_t column) {
    vf sum[R][C] = {};  // of this block alone: a sum of sums of 64 is more exact than one long sum
    float *to = acc + row * acc_stride + column;
    const float *p = tile + row * DECODE_N;
    const bool is_whole = column + C * VW <= c->head_dim_v;
    for (int64_t key = 0; key < n; key++) {
      const E *from = v[key] + column;
      prefetch((const char *)from + value_step, C * VW * (int64_t)sizeof(E));
      UNROLL for (int e = 0; e < C; e++) {
        const vf x = is_whole ? load_whole(from + e * VW) : load_row(v[key], column + e * VW, c->head_dim_v);
        UNROLL for (int r = 0; r < R; r++) sum[r][e] += splat(p[r * DECODE_N + key]) * x;
      }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int e = 0; e < C; e++) {
      float *at = to + r * acc_stride + e * VW;
      store(at, load(at) * alpha[row + r] + sum[r][e]);
    }
  }
  template <int R> void accumulate(const E *const *v, int64_t n, int64_t row) {
    int64_t column = 0;
    for (; column + 4 * VW <= c->head_dim_v; column += 4 * VW) accumulate_columns<R, 4>(v, n, row, column);
    for (; column < c->head_dim_v; column += VW) accumulate_columns<R, 1>(v, n, row, column);
  }
  // Softmax of plain scores, along the keys: tile becomes weights.
  void soften_rows(int64_t k0, int64_t n) {
    const int64_t end = round_up(n, VW);
    for (int64_t r = 0; r < rows; r++) {
      float *s = tile + r * DECODE_N;
      const int64_t i = panel->i_of(r);
      const Span seen = key_span(*c, task.sequence, i, i + 1);
      for (int64_t key = 0; key < min64(n, seen.lo - k0); key++) s[key] = -INFINITY;
      for (int64_t key = max64(0, min64(n, seen.hi - k0)); key < end; key++) s[key] = -INFINITY;
      vf top = load(s);
      for (int64_t key = VW; key < end; key += VW) top = maximum(top, load(s + key));
      const float old = state->row_max[r], fresh = fmaxf(old, maximum_of(top));
      const float finite = fresh == -INFINITY ? 0.f : fresh;
      vf sum = {};
      for (int64_t key = 0; key < end; key += VW) {
        const vf p = exp2_of<sizeof(E) == 4>((load(s + key) - finite) * f->scoring.factor);
        sum += p;
        store(s + key, p);
      }
      alpha[r] = old == -INFINITY ? 0.f : exp2f((old - finite) * f->scoring.factor);
      state->row_max[r] = fresh;
      state->row_sum[r] = state->row_sum[r] * alpha[r] + sum_of(sum);
    }
  }
  // The same for any scores, with the rows in lanes, as score.h has it.
  void soften_lanes(int64_t k0, int64_t n) {
    const Scoring &s = f->scoring;
    alignas(64) float tile_max[NQ], subtrahend[NQ];
    memset(lanes, 0, (size_t)(n * NQ * 4));
    for (int64_t r = 0; r < rows; r++)
      for (int64_t key = 0; key < n; key++) lanes[key * NQ + r] = tile[r * DECODE_N + key];
    const bool is_partial = !is_full(*c, task.sequence, panel->i_lo, panel->i_hi, k0, k0 + n);
    for (int64_t l = 0; l < NQ; l++) tile_max[l] = -INFINITY;
    score_tile(*c, s, *panel, task.sequence, lanes, k0, n, is_partial, 0, extra, 0, tile_max);
    raise_max(state, tile_max, s.factor, subtrahend, alpha);
    exponentials<sizeof(E) == 4>(lanes, n, s.factor, subtrahend, state->row_sum);
    if (s.has_dropout) dropout_tile(*c, 1.f, *panel, task.sequence, k0, n, extra);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t key = 0; key < n; key++)
        tile[r * DECODE_N + key] = lanes[key * NQ + r] * (s.has_dropout ? extra[key * NQ + r] : 1.f);
  }
  // keys[] is filled up to a multiple of four.
  void fold(const E *const *keys, const E *const *values, int64_t k0, int64_t n) {
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4)
      for (int64_t key = 0; key < n; key += 4) scores<4>(keys + key, key, row);
    for (; row < rows; row++)
      for (int64_t key = 0; key < n; key += 4) scores<1>(keys + key, key, row);
    if (f->scoring.is_plain && !f->scoring.has_dropout) soften_rows(k0, n);
    else soften_lanes(k0, n);
    for (row = 0; row + 4 <= rows; row += 4) accumulate<4>(values, n, row);
    for (; row < rows; row++) accumulate<1>(values, n, row);
  }
  bool run() {
    start();
    const Span span = task_keys(*c, f->plan, task, panel->i_lo, panel->i_hi, DECODE_N);
    for (int64_t k0 = span.lo - span.lo % DECODE_N; k0 < span.hi; k0 += DECODE_N) {
      const int64_t lo = max64(k0, span.lo / KEY_UNIT * KEY_UNIT), n = min64(k0 + DECODE_N, span.hi) - lo;
      const E *keys[DECODE_N + 4], *values[DECODE_N];
      const E *key = (const E *)key_row(*c, c->key, c->key_strides, task, lo);
      const E *value = (const E *)key_row(*c, c->value, c->value_strides, task, lo);
      for (int64_t j = 0; j < n; j++, key += c->key_strides[1], value += c->value_strides[1]) keys[j] = key, values[j] = value;
      for (int64_t j = 0; j < 4; j++) keys[n + j] = keys[n - 1];
      fold(keys, values, lo, n);
    }
    return finish();
  }
  bool finish() {
    bool is_finite = true;
    for (int64_t l = 0; l < rows; l++) {
      const int64_t i = panel->i_of(l), q_head = panel->head[l];
      const float *sum = acc + l * acc_stride;
      const float factor = state->row_sum[l] > 0 ? f->scoring.keep_factor / state->row_sum[l] : 0.f;
      E *out = (E *)query_row(*c, c->out, c->out_strides, task, i, q_head);
      FiniteCheck check;
      for (int64_t t = 0; t < c->head_dim_v; t += 8) {
        const v8 x = *(const v8_any *)(sum + t);
        check.see(x);
        if (!f->parts) store8(out + t, x * factor, c->head_dim_v - t);
      }
      is_finite &= finish_row(*f, task, i, q_head, state->row_max[l], state->row_sum[l]) & check.is_finite();
      if (f->parts) memcpy(part_of(*f, task, i, q_head) + 2, sum, (size_t)c->head_dim_v * 4);
    }
    return is_finite;
  }
};
