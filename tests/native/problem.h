// Random calls of the native kernels: tensors that end where their memory does, everything else NaN (all bits one).
#pragma once
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <memory>
#include <vector>
#include "../../tilestream/backends/cpu/native/src/call.h"

static thread_local uint64_t random_state;
static uint64_t random_bits() {  // splitmix64
  uint64_t z = random_state += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}
static int64_t below(int64_t n) { return (int64_t)(random_bits() % (uint64_t)n); }
static bool one_in(int64_t n) { return below(n) == 0; }
static double uniform() { return (double)(random_bits() >> 11) * 0x1p-53; }
static double normal() {
  double sum = -6;
  for (int t = 0; t < 12; t++) sum += uniform();
  return sum;
}
template <size_t N> static int64_t pick(const int (&list)[N]) { return list[below(N)]; }

// ---- element types, and what rounding to one costs: half a unit in the last of its PRECISION bits
static const int PRECISION[] = {24, 8, 11, 53}, BYTES[] = {4, 2, 2, 8};
static const char *const NAMES[] = {"float32", "bfloat16", "float16"};
static double decode(int64_t dtype, const char *at) {
  if (dtype == DTYPE_F64) return *(const double *)at;
  if (dtype == DTYPE_F32) return *(const float *)at;
  const uint16_t bits = *(const uint16_t *)at;
  if (dtype == DTYPE_BF16) {
    const uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, 4);
    return x;
  }
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double size = exponent == 31 ? (fraction ? NAN : INFINITY)
                                     : ldexp(exponent ? 1024 + fraction : fraction, (exponent ? exponent : 1) - 25);
  return bits >> 15 ? -size : size;
}
static void encode(int64_t dtype, char *at, double x) {  // x: 0, not finite, or a normal number of the type
  int exponent = 0;
  const double fraction = frexp(x, &exponent);
  if (isfinite(x)) x = ldexp(nearbyint(ldexp(fraction, PRECISION[dtype])), exponent - PRECISION[dtype]);
  const float single = (float)x;
  uint32_t wide;
  memcpy(&wide, &single, 4);
  uint16_t half = (uint16_t)(wide >> 16);
  if (dtype == DTYPE_F16) {
    const uint32_t size = wide & 0x7fffffff;
    half = (uint16_t)(!isfinite(x) ? 0x7c00 | (wide >> 13 & 0x3ff) : size < 0x38800000 ? 0 : (size - 0x38000000) >> 13);
    half |= (uint16_t)(wide >> 16 & 0x8000);
  }
  const void *bits = dtype == DTYPE_F64 ? (const void *)&x : dtype == DTYPE_F32 ? (const void *)&single : &half;
  memcpy(at, bits, (size_t)BYTES[dtype]);
}

// ---- tensors: (batch, token, head, width), or (batch, head, query, key) of a bias; strides in elements
struct Tensor {
  int64_t dtype = 0, dims[4] = {}, strides[4] = {}, bytes = 0;
  std::unique_ptr<char[]> memory;
  std::vector<double> exact;  // what `fill` put there, without strides
  char *base = nullptr;  // null: not there

  // `order`: dimensions from the innermost out. Elements are `step` apart, rows and so on followed by `pad` more.
  void allocate(int64_t type, const int64_t (&sizes)[4], const int (&order)[4], int64_t step, int64_t pad,
                int64_t start) {
    dtype = type;
    int64_t last = 0, count = 1;
    for (int k : order) {
      dims[k] = sizes[k], strides[k] = step, count *= sizes[k];
      last += (sizes[k] - 1) * step;
      step = step * sizes[k] + pad;
    }
    bytes = (start + (count ? last + 1 : 0)) * BYTES[dtype];
    memory.reset(new char[(size_t)bytes]);
    base = memory.get() + start * BYTES[dtype];
    poison();
  }
  void poison() {
    if (base) memset(memory.get(), 0xff, (size_t)bytes);
  }
  int64_t offset(int64_t a, int64_t b, int64_t c, int64_t d) const {  // a dimension of size 1 is broadcast
    const int64_t at[4] = {a, b, c, d};
    int64_t sum = 0;
    for (int k = 0; k < 4; k++) sum += dims[k] == 1 ? 0 : at[k] * strides[k];
    return sum;
  }
  char *at(int64_t a, int64_t b, int64_t c, int64_t d) const { return base + offset(a, b, c, d) * BYTES[dtype]; }
  double get(int64_t a, int64_t b, int64_t c, int64_t d) const { return decode(dtype, at(a, b, c, d)); }
  void set(int64_t a, int64_t b, int64_t c, int64_t d, double x) { encode(dtype, at(a, b, c, d), x); }
  int64_t row_index(int64_t a, int64_t b, int64_t c) const {  // among all rows
    return ((dims[0] == 1 ? 0 : a) * dims[1] + (dims[1] == 1 ? 0 : b)) * dims[2] + (dims[2] == 1 ? 0 : c);
  }
  const double *row(int64_t a, int64_t b, int64_t c) const {
    return exact.data() + row_index(a, b, c) * dims[3];
  }
  template <class F> void fill(int64_t tokens, F value) {  // leaves tokens from `tokens` on poisoned
    exact.assign((size_t)(dims[0] * dims[1] * dims[2] * dims[3]), NAN);
    auto next = exact.begin();
    for (int64_t a = 0; a < dims[0]; a++)
      for (int64_t b = 0; b < (tokens < 0 ? dims[1] : tokens); b++)
        for (int64_t c = 0; c < dims[2]; c++)
          for (int64_t d = 0; d < dims[3]; d++) {
            set(a, b, c, d, value());
            *next++ = get(a, b, c, d);
          }
  }
};

struct Value {  // an exact result, and how far from it the kernel's may be
  double x = 0, bound = 0;
  void add(double term, double error) { x += term, bound += error; }
};
enum { OUT, LSE, DELTA, DQ, DK, DV, DBIAS, NUM_RESULTS };
static const char *const RESULTS[] = {"out", "lse", "delta", "dq", "dk", "dv", "dbias"};

// A block mask: lists as tilestream/block_mask/tiles.py makes them, and the pairs that they show.
struct Mask {
  Lists lists = {};
  std::vector<int32_t> offsets, columns, patterns, order;
  std::vector<uint32_t> bits;
  std::vector<char> shown;  // (planes, seqlen_q, seqlen_k)
};

struct Problem {
  Call call = {};
  Mask mask;
  Tensor query, key, value, bias, dout, dlse, results[NUM_RESULTS];
  std::vector<int32_t> cu_q, cu_k;
  std::vector<float> alibi, sinks;
  std::vector<Value> expected[NUM_RESULTS];
  std::vector<char> before[NUM_RESULTS];  // bytes of an earlier run

  bool is_packed() const { return call.cu_seqlens_q; }
  int64_t covered(bool of_keys) const {
    return !is_packed() ? (of_keys ? call.seqlen_k : call.seqlen_q) : (of_keys ? cu_k : cu_q).back();
  }
  bool shows(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const int64_t *strides = mask.lists.plane_strides;
    return !call.lists || mask.shown[(size_t)(((b * strides[0] + h * strides[1]) * call.seqlen_q + i) * call.seqlen_k + j)];
  }
  // The row of a result that starts with element (b, t, h, 0); (0, t, h, 0) where packed. Of dbias: (b, head, i, 0).
  Value *row(int result, int64_t b, int64_t t, int64_t h) {
    return expected[result].data() + results[result].row_index(b, t, h) * results[result].dims[3];
  }
  void zero_unreached(int result, size_t b) {
    const bool packed = is_packed();
    if ((packed ? cu_q[b + 1] - cu_q[b] : call.seqlen_q) > 0) return;
    Tensor &x = results[result];
    for (int64_t t = packed ? cu_k[b] : 0; t < (packed ? cu_k[b + 1] : call.seqlen_k); t++)
      for (int64_t h = 0; h < x.dims[2]; h++)
        for (int64_t e = 0; e < x.dims[3]; e++) x.set(packed ? 0 : (int64_t)b, t, h, e, 0);
  }
  int run(int64_t num_threads) {
    call.num_threads = num_threads;
    for (Tensor &r : results) r.poison();
    // What a caller zeroes: dk and dv of sequences without queries, which no task reaches; dbias, which is added to.
    for (int64_t b = 0; b < call.batch; b++)
      for (int r : {DK, DV}) zero_unreached(r, (size_t)b);
    if (call.dbias) memset(results[DBIAS].memory.get(), 0, (size_t)results[DBIAS].bytes);
    const int status = tilestream_forward(&call);
    return status ? status : tilestream_backward(&call);
  }
  void remember() {
    for (int r = 0; r < NUM_RESULTS; r++) {
      const char *bytes = results[r].memory.get();
      before[r].assign(bytes, bytes + results[r].bytes);
    }
  }
  bool is_as_before() const {
    for (int r = 0; r < NUM_RESULTS; r++)
      if (results[r].bytes && memcmp(before[r].data(), results[r].memory.get(), before[r].size())) return false;
    return true;
  }
};

// ---- making calls
static const int WIDTHS[] = {1, 7, 40, 64, 96, 128, 256}, LENGTHS[] = {0, 1, 2, 15, 33, 63, 64, 65, 127, 200, 400};

// What random calls meet too seldom: tasks of several panels under a window (how many depends on the threads), rows of
// a query that fall into two tasks which share an entry of dbias, many rows for few heads, few rows for many
// keys. `bias`: see make_bias().
struct Special {
  int64_t dtype, batch, num_heads_kv, group, seqlen_q, seqlen_k, head_dim, left, right, bias;
};
static const Special SPECIAL[] = {
    {1, 1, 8, 1, 400, 400, 40, 37, 0, -1}, {2, 1, 8, 1, 400, 400, 40, 37, 0, -1}, {0, 1, 8, 1, 400, 400, 40, 37, 0, -1},
    {1, 1, 1, 3, 200, 200, 40, NO_LIMIT, NO_LIMIT, 2}, {2, 1, 2, 7, 127, 90, 7, NO_LIMIT, 0, 3},
    {0, 2, 2, 5, 127, 90, 7, NO_LIMIT, 0, 3}, {0, 2, 1, 7, 127, 200, 40, 20, 20, 2},
    {0, 1, 1, 1, 1500, 400, 7, 90, 0, -1}, {1, 1, 1, 1, 1500, 400, 7, 90, 0, -1},
    {0, 1, 2, 2, 3, 1100, 40, NO_LIMIT, 0, -1}, {1, 1, 2, 2, 3, 1100, 40, NO_LIMIT, 0, -1},
};
static const int64_t NUM_SPECIAL = sizeof(SPECIAL) / sizeof(SPECIAL[0]);

static void choose_shape(Problem *p, int64_t index) {
  static const int GROUPS[] = {1, 1, 2, 3, 4, 7}, KEYS[] = {700, 1100, 2100}, HEADS[] = {1, 2, 3};
  Call &c = p->call;
  c.dtype = index % 3;
  c.head_dim = WIDTHS[index / 3 % 7];
  c.head_dim_v = one_in(2) ? c.head_dim : pick(WIDTHS);
  c.batch = pick(HEADS), c.num_heads_kv = pick(HEADS), c.num_heads_q = c.num_heads_kv * pick(GROUPS);
  c.seqlen_q = pick(LENGTHS), c.seqlen_k = one_in(3) ? c.seqlen_q : pick(LENGTHS);
  if (one_in(6)) c.seqlen_q = 1 + below(5), c.seqlen_k = pick(KEYS);  // decoding, keys split over tasks
  if (one_in(40)) c.batch = 0;
  // Most calls are small, some have enough rows for every thread to take several tasks.
  const int64_t limit = one_in(12) ? 24 << 20 : 3 << 20;
  while (c.batch * c.num_heads_q * c.seqlen_q * c.seqlen_k * (c.head_dim + c.head_dim_v) > limit) {
    if (c.batch > 1) c.batch = 1;
    else if (c.num_heads_kv > 1) c.num_heads_q /= c.num_heads_kv, c.num_heads_kv = 1;
    else if (c.num_heads_q > 3) c.num_heads_q = 3;
    else if (c.seqlen_q > 5) c.seqlen_q = c.seqlen_q * 2 / 3;
    else c.seqlen_k /= 2;
  }
}
static void choose_features(Problem *p) {
  Call &c = p->call;
  const int band = (int)below(5);  // none (twice), causal, window, a band that may miss some rows
  c.left = band == 3 ? below(70) : band == 4 ? below(9) : NO_LIMIT;
  c.right = band == 2 ? 0 : band == 3 ? below(30) : band == 4 ? below(3) : NO_LIMIT;
  c.shift = c.seqlen_k - c.seqlen_q + (one_in(3) ? below(41) - 20 : 0);
  c.scale = one_in(9) ? -0.4 : one_in(30) ? 0 : 1 / sqrt((double)c.head_dim);
  c.softcap = one_in(4) ? 2.5 : 0;
  c.dropout_p = one_in(4) ? 0.3 : 0;
  c.keep_threshold = c.dropout_p > 0 ? llround((1 - c.dropout_p) * 0x1p32) : INT64_C(1) << 32;
  c.seed = (int64_t)random_bits();
}
// Random lengths of sequences, empty ones among them; some tokens may belong to none.
static int64_t cut(std::vector<int32_t> *ends, int64_t batch, int64_t longest) {
  ends->assign((size_t)batch + 1, 0);
  for (int64_t b = 0; b < batch; b++)
    (*ends)[(size_t)b + 1] = (*ends)[(size_t)b] + (int32_t)(b == 0 ? longest : one_in(3) ? 0 : below(longest + 1));
  return ends->back() + (one_in(3) ? 3 : 0);
}
static char *make(Tensor *x, int64_t dtype, const int64_t (&dims)[4], int64_t (&strides)[3], bool is_packed) {
  static const int BY_TOKEN[] = {3, 2, 1, 0}, BY_HEAD[] = {3, 1, 2, 0}, PADS[] = {0, 0, 1, 5};
  const int64_t pad = pick(PADS), start = below(4);
  if (one_in(2)) x->allocate(dtype, dims, BY_TOKEN, 1, pad, start);
  else x->allocate(dtype, dims, BY_HEAD, 1, pad, start);
  for (int k = 0; k < 3; k++) strides[k] = is_packed && k == 0 ? INT64_C(1) << 40 : x->strides[k];
  return x->base;
}
// Bit k of the pattern: dimension k is broadcast.
static void make_bias(Problem *p, int64_t pattern, bool has_gradient) {
  static const int ROWS[] = {3, 2, 1, 0}, COLUMNS[] = {2, 3, 1, 0};
  Call &c = p->call;
  int64_t dims[4] = {c.batch, c.num_heads_q, c.seqlen_q, c.seqlen_k};
  for (int k = 0; k < 4; k++)
    if (pattern >> k & 1) dims[k] = 1;
  c.bias_dtype = below(4);
  if (one_in(3)) p->bias.allocate(c.bias_dtype, dims, COLUMNS, 1, 2, 1);
  else p->bias.allocate(c.bias_dtype, dims, ROWS, 1 + below(2), below(3), below(3));
  p->bias.fill(-1, [] { return one_in(12) ? -INFINITY : normal(); });
  c.bias = p->bias.base;
  for (int k = 0; k < 4; k++) c.bias_strides[k] = dims[k] == 1 ? 0 : p->bias.strides[k];
  if (!has_gradient) return;
  // Sums that tasks would make in no fixed order get entries of their own: `_bias_sums` in native/__init__.py.
  if (dims[2] == 1) dims[3] = c.seqlen_k;
  if (dims[2] == 1 || dims[3] == 1) dims[0] = c.batch, dims[1] = c.num_heads_q;
  Tensor &d = p->results[DBIAS];
  d.allocate(DTYPE_F32, dims, ROWS, 1, 0, 0);
  c.dbias = (float *)d.base;
  for (int k = 0; k < 4; k++) c.dbias_strides[k] = dims[k] == 1 ? 0 : d.strides[k];
}
static void make_tensors(Problem *p, bool is_packed) {
  static const int LSE_ORDER[] = {3, 1, 2, 0};
  Call &c = p->call;
  const int64_t tokens_q = is_packed ? cut(&p->cu_q, c.batch, c.seqlen_q) : c.seqlen_q;
  const int64_t tokens_k = is_packed ? cut(&p->cu_k, c.batch, c.seqlen_k) : c.seqlen_k;
  if (is_packed) c.cu_seqlens_q = p->cu_q.data(), c.cu_seqlens_k = p->cu_k.data();
  const int64_t b = is_packed ? 1 : c.batch, d = c.head_dim, dv = c.head_dim_v;
  const int64_t q[4] = {b, tokens_q, c.num_heads_q, d}, k[4] = {b, tokens_k, c.num_heads_kv, d};
  const int64_t lse[4] = {b, tokens_q, c.num_heads_q, 1};
  const int64_t v[4] = {b, tokens_k, c.num_heads_kv, dv}, out[4] = {b, tokens_q, c.num_heads_q, dv};
  c.query = make(&p->query, c.dtype, q, c.query_strides, is_packed);
  c.dq = make(&p->results[DQ], c.dtype, q, c.dq_strides, is_packed);
  c.key = make(&p->key, c.dtype, k, c.key_strides, is_packed);
  c.dk = make(&p->results[DK], c.dtype, k, c.dk_strides, is_packed);
  c.value = make(&p->value, c.dtype, v, c.value_strides, is_packed);
  c.dv = make(&p->results[DV], c.dtype, v, c.dv_strides, is_packed);
  c.dout = make(&p->dout, c.dtype, out, c.dout_strides, is_packed);
  c.out = make(&p->results[OUT], c.dtype, out, c.out_strides, is_packed);
  for (int r : {LSE, DELTA}) p->results[r].allocate(DTYPE_F32, lse, LSE_ORDER, 1, 0, 0);
  c.lse = (float *)p->results[LSE].base, c.delta = (float *)p->results[DELTA].base;
  c.lse_strides[0] = is_packed ? INT64_C(1) << 40 : p->results[LSE].strides[0];
  c.lse_strides[1] = p->results[LSE].strides[2];
  if (one_in(2)) {
    p->dlse.allocate(DTYPE_F32, lse, LSE_ORDER, 1 + below(2), below(3), 0);
    p->dlse.fill(p->covered(false), normal);
    c.dlse = (const float *)p->dlse.base;
    const int64_t *strides = p->dlse.strides;
    c.dlse_strides[0] = strides[0], c.dlse_strides[1] = strides[2], c.dlse_strides[2] = strides[1];
  }
  for (Tensor *x : {&p->query, &p->dout}) x->fill(p->covered(false), normal);
  for (Tensor *x : {&p->key, &p->value}) x->fill(p->covered(true), normal);
}
// One row of tiles: PARTIAL ones first, from left to right. `shown` is that of its first query.
static void make_tiles(const Call &c, Mask *m, int64_t rows, char *shown) {
  const int64_t words = (m->lists.tile_n + 31) / 32, kept = 1 + below(4);
  std::vector<int32_t> full;
  for (int64_t k0 = 0; k0 < c.seqlen_k; k0 += m->lists.tile_n) {
    const int64_t width = k0 + m->lists.tile_n < c.seqlen_k ? m->lists.tile_n : c.seqlen_k - k0;
    if (!one_in(kept)) continue;
    const bool is_full = one_in(2);
    if (is_full) full.push_back((int32_t)(k0 / m->lists.tile_n));
    const size_t first = m->bits.size();
    const int64_t density = 1 + below(3);  // seldom no pair, or all
    if (!is_full) {
      m->columns.push_back((int32_t)(k0 / m->lists.tile_n));
      m->patterns.push_back((int32_t)((int64_t)first / (m->lists.tile_m * words)));
      m->bits.resize(first + (size_t)(m->lists.tile_m * words));
    }
    for (int64_t i = 0; i < rows; i++)
      for (int64_t j = 0; j < width; j++) {
        if (!is_full && !one_in(density)) continue;
        shown[i * c.seqlen_k + k0 + j] = 1;
        if (!is_full) m->bits[first + (size_t)(i * words + j / 32)] |= 1u << (j % 32);
      }
  }
  m->columns.insert(m->columns.end(), full.begin(), full.end());
  m->patterns.resize(m->columns.size(), -1);
  m->offsets.push_back((int32_t)m->columns.size());
}
static void make_mask(Problem *p) {
  static const int TILE_M[] = {3, 16, 32, 64, 128}, TILE_N[] = {32, 36, 64, 128, 256};
  Call &c = p->call;
  Mask *m = &p->mask;
  Lists *lists = &m->lists;
  const bool by_batch = c.batch > 1 && one_in(3), by_head = one_in(3);
  lists->packed_heads = by_head || one_in(5) ? 1 : c.num_heads_q / c.num_heads_kv;
  lists->tile_m = pick(TILE_M), lists->tile_n = pick(TILE_N);
  const int64_t most = (tilestream_tile_shape(c.dtype, 1) >> 32) / lists->packed_heads;
  if (lists->tile_m > most) lists->tile_m = most;
  lists->num_rows = (c.seqlen_q + lists->tile_m - 1) / lists->tile_m;
  lists->plane_strides[0] = by_batch ? (by_head ? c.num_heads_q : 1) : 0, lists->plane_strides[1] = by_head;
  const int64_t planes = (by_batch ? c.batch : 1) * (by_head ? c.num_heads_q : 1);
  m->shown.resize((size_t)(planes * c.seqlen_q * c.seqlen_k));
  m->offsets.push_back(0);
  for (int64_t plane = 0; plane < planes; plane++)
    for (int64_t r = 0; r < lists->num_rows; r++) {
      const int64_t i = r * lists->tile_m, rows = i + lists->tile_m < c.seqlen_q ? lists->tile_m : c.seqlen_q - i;
      make_tiles(c, m, rows, m->shown.data() + (plane * c.seqlen_q + i) * c.seqlen_k);
      m->order.push_back((int32_t)((r + 1) % lists->num_rows));  // whatever the lengths
    }
  for (auto *x : {&m->offsets, &m->columns, &m->patterns, &m->order}) x->shrink_to_fit();
  m->bits.shrink_to_fit();
  lists->offsets = m->offsets.data(), lists->columns = m->columns.data(), lists->patterns = m->patterns.data();
  lists->order = m->order.data(), lists->bits = m->bits.data();
  if (!p->is_packed()) c.left = c.right = NO_LIMIT;  // such lists would hold the band
  c.lists = lists;
}
static void make_problem(Problem *p, int64_t index) {
  random_state = (uint64_t)index * 7919;
  Call &c = p->call;
  choose_shape(p, index);
  choose_features(p);
  if (index < NUM_SPECIAL) {
    const Special &s = SPECIAL[index];
    c.dtype = s.dtype, c.batch = s.batch, c.num_heads_kv = s.num_heads_kv, c.num_heads_q = s.num_heads_kv * s.group;
    c.seqlen_q = s.seqlen_q, c.seqlen_k = s.seqlen_k, c.head_dim = c.head_dim_v = s.head_dim;
    c.left = s.left, c.right = s.right, c.shift = s.seqlen_k - s.seqlen_q, c.scale = 0.2;
    make_tensors(p, false);
    if (s.bias >= 0) make_bias(p, s.bias, true);
    return;
  }
  make_tensors(p, one_in(3));
  if (one_in(2)) make_bias(p, below(16), !one_in(3));
  if (one_in(3)) {
    const bool by_batch = one_in(2);
    p->alibi.resize((size_t)((by_batch ? c.batch : 1) * c.num_heads_q));
    for (float &slope : p->alibi) slope = (float)uniform() / 8;
    c.alibi = p->alibi.data(), c.alibi_strides[0] = by_batch ? c.num_heads_q : 0, c.alibi_strides[1] = 1;
  }
  if (one_in(3)) {
    p->sinks.resize((size_t)c.num_heads_q);
    for (float &sink : p->sinks) sink = (float)normal();
    c.sinks = p->sinks.data();
  }
  if (one_in(3)) make_mask(p);
}
