// The score pipeline on one tile of a panel, and its backward twin: softcap, bias, ALiBi, mask, in that order.
// A tile is score[key][lane]: one panel of NQ packed query rows in the lanes, n keys from position k0 on.
#pragma once
#include "gemm.h"
#include "pack.h"
#include "plan.h"

struct Panel {
  const char *query_rows[NQ], *bias_rows[NQ];
  int64_t n;                         // rows in use; the other lanes hold zeros
  int64_t row_lo, i_lo, i_hi;        // first packed row; its queries are [i_lo, i_hi)
  alignas(64) int32_t i_offset[NQ];  // i - i_lo
  alignas(64) uint32_t head[NQ];
  alignas(64) float slope[NQ];
  int64_t i_of(int64_t lane) const { return i_lo + i_offset[lane]; }
};

// How raw dot products become scores. A plain tile stays raw, in units of |scale|: differences are taken before anything is
// multiplied, so that scores of any size lose no more than their own last place. Other tiles are made scores.
struct Scoring {
  float sign;       // what queries are packed with: the sign of the scale, so that a maximum stays one
  float magnitude;  // |scale|
  float unit;       // of a tile that is ready: |scale| where is_plain, else 1
  float factor;     // unit * log2(e)
  bool is_plain, has_softcap, has_dropout;
  float into_cap, cap;  // tanh(raw * into_cap) * cap
  float keep_factor;    // 1 / (1 - dropout_p), or 1
};

static Scoring scoring_of(const Call &c) {
  Scoring s;
  const double magnitude = fabs(c.scale);
  s.sign = c.scale > 0 ? 1.f : c.scale < 0 ? -1.f : 0.f;
  s.magnitude = (float)magnitude;
  s.has_softcap = c.softcap > 0;
  s.has_dropout = c.keep_threshold < (INT64_C(1) << 32);
  s.is_plain = !s.has_softcap && !c.bias && !c.alibi && magnitude > 1e-10;  // a sink is divided by the unit
  s.unit = s.is_plain ? s.magnitude : 1.f;
  s.factor = s.is_plain ? (float)(magnitude * 1.44269504088896340736) : LOG2E;
  s.into_cap = s.has_softcap ? (float)(magnitude / c.softcap) : 1.f;
  s.cap = (float)c.softcap;
  s.keep_factor = (float)(1.0 / (1.0 - c.dropout_p));
  return s;
}

static void panel_of(const Call &c, const Task &t, int64_t group, int64_t row_lo, int64_t row_hi, Panel *p) {
  const int64_t bias_size = c.bias ? size_of_dtype(c.bias_dtype) : 0;
  p->row_lo = row_lo;
  p->n = min64(NQ, row_hi - row_lo);
  p->i_lo = row_lo / group;
  p->i_hi = (row_lo + p->n - 1) / group + 1;
  int64_t i = p->i_lo, member = row_lo % group;  // counted on, because divisions would take as long as a short call
  for (int64_t l = 0; l < NQ; l++) {
    const int64_t head = t.first_head + member;
    p->i_offset[l] = (int32_t)(i - p->i_lo);
    p->head[l] = (uint32_t)head;
    p->query_rows[l] = query_row(c, c.query, c.query_strides, t, i, head);
    if (c.alibi) p->slope[l] = c.alibi[t.sequence.batch * c.alibi_strides[0] + head * c.alibi_strides[1]];
    if (c.bias)
      p->bias_rows[l] = c.bias + bias_size * (t.sequence.batch * c.bias_strides[0] + head * c.bias_strides[1] +
                                              i * c.bias_strides[2]);
    if (l + 1 < p->n && ++member == group) member = 0, i++;  // lanes beyond the last row repeat it
  }
}

// dst[key][lane] = bias
template <class E> static void load_bias(const Call &c, const Panel &p, int64_t k0, int64_t n, float *dst) {
  const int64_t stride = c.bias_strides[3];
  if (stride == 1) {
    const char *rows[NQ];
    for (int64_t l = 0; l < NQ; l++) rows[l] = p.bias_rows[l] + k0 * sizeof(E);
    pack_transposed<E>(rows, p.n, NQ, n, dst, NQ, 1.f);
    return;
  }
  for (int64_t l = 0; l < NQ; l++)
    for (int64_t key = 0; key < n; key++) {
      const E *source = (const E *)p.bias_rows[l] + (k0 + key) * stride;
      dst[key * NQ + l] = l < p.n ? load8(source, 1)[0] : 0.f;
    }
}

// The tile's raw dot products become scores, in place, and raise `row_max` (NQ,). `bias` is scratch of the tile's size,
// `tanh_tile` (or null) keeps tanh for the backward. The band hides pairs if `is_partial`, and so do bits that are 0: bit
// `key` of shown[lane] (or null), which has up to 32 keys.
static void score_tile(const Call &c, const Scoring &s, const Panel &p, const Sequence &q, float *tile, int64_t k0,
                       int64_t n, bool is_partial, const int32_t *shown, float *bias, float *tanh_tile, float *row_max) {
  if (c.bias) {
    switch (c.bias_dtype) {
      case DTYPE_F32: load_bias<f32>(c, p, k0, n, bias); break;
      case DTYPE_BF16: load_bias<bf16>(c, p, k0, n, bias); break;
      case DTYPE_F16: load_bias<f16>(c, p, k0, n, bias); break;
      default: load_bias<f64>(c, p, k0, n, bias);
    }
  }
  const int64_t far = INT64_C(1) << 29;
  for (int64_t j = 0; j < NV; j++) {
    const vi i_offset = *(const vi *)(p.i_offset + j * VW);
    const vf slope = c.alibi ? *(const vf *)(p.slope + j * VW) : (vf){};
    const vi bits = shown ? *(const vi *)(shown + j * VW) : (vi){};
    vf top = load(row_max + j * VW);
    for (int64_t key = 0; key < n; key++) {
      float *at = tile + key * NQ + j * VW;
      vf x = load(at);
      if (s.has_softcap) {
        x = tanh_of(x * splat(s.into_cap));
        if (tanh_tile) store(tanh_tile + key * NQ + j * VW, x);
        x = x * splat(s.cap);
      } else if (!s.is_plain) {
        x = x * splat(s.magnitude);
      }
      const int64_t distance = k0 + key - (p.i_lo + q.shift);  // of the panel's first query
      if (c.bias) x += load(bias + key * NQ + j * VW);
      if (c.alibi) {
        const vf d = distance > far || distance < -far
                         ? splat((float)distance)
                         : __builtin_convertvector(splat_int((int32_t)distance) - i_offset, vf);
        x -= slope * (vf)((vi)d & splat_int(0x7fffffff));
      }
      if (is_partial) {  // hidden: offset < distance - right, or offset > distance + left
        const int32_t lo = (int32_t)max64(-far, min64(far, distance - c.right));
        const int32_t hi = (int32_t)max64(-far, min64(far, distance + c.left));
        x = select((vi)(i_offset < splat_int(lo)) | (vi)(i_offset > splat_int(hi)), splat(-INFINITY), x);
      }
      if (shown) x = select(bits << splat_int(31 - (int32_t)key) >> splat_int(31), x, splat(-INFINITY));
      store(at, x);
      top = maximum(top, x);
    }
    store(row_max + j * VW, top);
  }
}

// ---- dropout: Philox4x32-10 with counter (j / 4, i, head, batch) and the seed as key; key j takes word j % 4
struct Words {
  vu word[4];
};
static AI void multiply_wide(vu a, uint32_t b, vu *hi, vu *lo) {
  typedef uint64_t wide __attribute__((vector_size(VW * 8)));
  const wide product = __builtin_convertvector(a, wide) * (uint64_t)b;
  *lo = __builtin_convertvector(product, vu);
  *hi = __builtin_convertvector(product >> 32, vu);
}
static Words philox(uint32_t key_group, vu i, vu head, uint32_t batch, uint64_t seed) {
  vu c0 = key_group - (vu){}, c1 = i, c2 = head, c3 = batch - (vu){};
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
  for (int round = 0; round < 10; round++) {
    vu hi0, lo0, hi1, lo1;
    multiply_wide(c0, 0xD2511F53u, &hi0, &lo0);
    multiply_wide(c2, 0xCD9E8D57u, &hi1, &lo1);
    const vu next0 = hi1 ^ c1 ^ k0, next2 = hi0 ^ c3 ^ k1;
    c0 = next0, c1 = lo1, c2 = next2, c3 = lo0;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}
// keep[key][lane] = `kept` or 0, for keys [k0, k0 + n); k0 is a multiple of 4 and `keep` has room for n up to one.
static void dropout_tile(const Call &c, float kept, const Panel &p, const Sequence &q, int64_t k0, int64_t n,
                         float *keep) {
  for (int64_t key = 0; key < n; key += 4)
    for (int64_t j = 0; j < NV; j++) {
      const vu i = *(const vu *)(p.i_offset + j * VW) + (uint32_t)p.i_lo;
      const Words words = philox((uint32_t)((k0 + key) / 4), i, *(const vu *)(p.head + j * VW), (uint32_t)q.batch,
                                 (uint64_t)c.seed);
      for (int w = 0; w < 4; w++) {
        const vi is_kept = (vi)(words.word[w] < ((uint32_t)c.keep_threshold - (vu){}));
        store(keep + (key + w) * NQ + j * VW, (vf)(is_kept & (vi)splat(kept)));
      }
    }
}

// tile = 2^((tile - subtrahend) * factor), and its sums over the keys are added to row_sum.
template <bool PRECISE>
NOINLINE static void exponentials(float *tile, int64_t n, float factor, const float *subtrahend, float *row_sum) {
  vf minus[NV], sum[NV] = {};
  const vf f = splat(factor);
  UNROLL for (int j = 0; j < NV; j++) minus[j] = load(subtrahend + j * VW);
  for (int64_t key = 0; key < n; key++)
    UNROLL for (int j = 0; j < NV; j++) {
      const vf p = exp2_of<PRECISE>((load(tile + key * NQ + j * VW) - minus[j]) * f);
      sum[j] += p;
      store(tile + key * NQ + j * VW, p);
    }
  UNROLL for (int j = 0; j < NV; j++) store(row_sum + j * VW, load(row_sum + j * VW) + sum[j]);
}

// p = e^(p * unit - lse), ds = p * (ds - delta), with ds = dout V^T before; false if some ds is not finite.
template <bool PRECISE>
NOINLINE static bool gradients(float *p_tile, float *ds_tile, const float *keep, int64_t n, float unit, const float *lse,
                               const float *delta) {
  vf minus[NV], d[NV], check = {};
  const vf u = splat(unit);
  UNROLL for (int j = 0; j < NV; j++) { minus[j] = load(lse + j * VW); d[j] = load(delta + j * VW); }
  for (int64_t at = 0; at < n * NQ; at += NQ)
    UNROLL for (int j = 0; j < NV; j++) {
      const int64_t here = at + j * VW;
      // Rounded before lse is taken off, as lse was: a row of one key gets 1 (up to the order of sums), however large.
      vf score = load(p_tile + here) * u, dp = load(ds_tile + here);
      IN_REGISTER(score);
      const vf p = exp2_of<PRECISE>((score - minus[j]) * splat(LOG2E));
      if (keep) dp *= load(keep + here);
      const vf ds = p * (dp - d[j]);
      check += ds * splat(0.f);
      store(p_tile + here, keep ? p * load(keep + here) : p);
      store(ds_tile + here, ds);
    }
  float total = 0;
  for (int t = 0; t < VW; t++) total += check[t];
  return total == 0.f;
}
