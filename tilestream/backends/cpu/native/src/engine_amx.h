// The engine of AMX tile products (bfloat16 x bfloat16, float32 sums) for the 16-bit types. A float16 is the sum of two
// bfloat16 (11 bits of significand in 8 + 8), so scores are exact as the sum of four products; weights in float32 are cut
// to two terms too, and the product of their low ones is left out. AMX multiplies 16 times as fast as FMAs, so four still
// win; the six that float32 would need do not.
// Interface: as engine_fma.h. An operand holds its TERMS planes one after the other; widths and keys are padded with 0.
//   plain  [row][width]           rows of the left operand: keys, or weights per key
//   pairs  [row / 2][width][2]    the right operand: rows 2r and 2r + 1 side by side
#pragma once
#include <sys/syscall.h>
#include <unistd.h>
#include "score.h"

static int64_t amx_permission(void) {
  const int request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

static AI __mmask32 first_lanes(int64_t n) { return n >= 32 ? 0xffffffffu : n <= 0 ? 0 : (1u << n) - 1; }
// 32 elements without touching memory beyond the first n; zeros after.
static AI __m512i load32(const char *p, int64_t n) { return _mm512_maskz_loadu_epi16(first_lanes(n), p); }
static AI __m512 low_half(__m512i x) { return _mm512_cvtph_ps(_mm512_castsi512_si256(x)); }
static AI __m512 high_half(__m512i x) { return _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1)); }
// Two vectors as 32 bfloat16, `low` first, rounded to nearest even.
static AI __m512i round_both(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }
static AI __m512 widen(__m512i bf16s, bool upper) {
  const __m256i half = upper ? _mm512_extracti64x4_epi64(bf16s, 1) : _mm512_castsi512_si256(bf16s);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
// x and y as planes of bfloat16 terms, x in the lower half of each vector.
template <int TERMS> static AI void split(__m512 x, __m512 y, __m512i *terms) {
  terms[0] = round_both(x, y);
  if constexpr (TERMS == 2)
    terms[1] = round_both(_mm512_sub_ps(x, widen(terms[0], false)), _mm512_sub_ps(y, widen(terms[0], true)));
}
// Element i of the lower half beside element i of the upper.
static AI __m512i interleave_halves(__m512i x) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                         20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, x);
}
// Halves 0 or 1 of two rows, interleaved.
static AI __m512i interleave_rows(__m512i even, __m512i odd, bool upper) {
  return interleave_halves(upper ? _mm512_shuffle_i64x2(even, odd, 0xee) : _mm512_shuffle_i64x2(even, odd, 0x44));
}
static AI void transpose_words(const char *src, int64_t src_stride, char *dst, int64_t dst_stride) {  // 8 x 8
  v8 r[8];
  UNROLL for (int i = 0; i < 8; i++) r[i] = *(const v8_any *)(src + i * src_stride);
  transpose8(r);
  UNROLL for (int i = 0; i < 8; i++) *(v8_any *)(dst + i * dst_stride) = r[i];
}

struct Tiles {  // one operand: distance of rows in bytes, and of planes
  const char *base;
  int64_t stride, plane;
};

// C (32 x 32 float32) (+)= A B over `chunks` of 32, for all pairs of terms, or all that matter where weights are rounded.
template <int TERMS, bool ADDS, bool ALL>
static AI void tile_block(Tiles A, Tiles B, int64_t chunks, float *C, int64_t c_stride) {
  char *c = (char *)C, *below = c + 16 * c_stride;
  if (ADDS) {
    _tile_loadd(0, c, c_stride);
    _tile_loadd(1, c + 64, c_stride);
    _tile_loadd(2, below, c_stride);
    _tile_loadd(3, below + 64, c_stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < chunks; k++, A.base += 64, B.base += 16 * B.stride)
    UNROLL for (int i = 0; i < TERMS; i++) {
      const char *a = A.base + i * A.plane;
      _tile_loadd(4, a, A.stride);
      _tile_loadd(5, a + 16 * A.stride, A.stride);
      UNROLL for (int j = 0; j < (ALL ? TERMS : TERMS - i); j++) {
        const char *b = B.base + j * B.plane;
        _tile_loadd(6, b, B.stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + 64, B.stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
  _tile_stored(0, c, c_stride);
  _tile_stored(1, c + 64, c_stride);
  _tile_stored(2, below, c_stride);
  _tile_stored(3, below + 64, c_stride);
}

template <class E> struct Amx {
  static constexpr bool PRECISE = false;
  static constexpr int TERMS = __is_same(E, f16) ? 2 : 1;
  static constexpr int BLOCK_N = 96, BLOCK_PANELS = 16, BACKWARD_N = 96, BACKWARD_PANELS = 8;
  static constexpr int MAX_UNIT = 1, OUTER_ROWS = 32;
  // Its products take 32 keys at once, and parts of tiles are 8 or more.
  static constexpr bool SHARES_TILES = false;
  static_assert(NQ == 32 && VW == 16, "a panel is one block of tiles");
  static int64_t padded(int64_t x) { return round_up(x, 32); }

  static void begin() {
    struct { uint8_t palette, start_row, reserved[14]; uint16_t colsb[16]; uint8_t rows[16]; } config = {};
    config.palette = 1;
    for (int t = 0; t < 8; t++) config.colsb[t] = 64, config.rows[t] = 16;
    _tile_loadconfig(&config);
  }
  static void end() { _tile_release(); }

  // Terms of 32 elements of a row; raises `bad` where one is not finite.
  static AI void read(const char *row, int64_t t, int64_t width, __mmask32 *bad, __m512i *terms) {
    const __m512i x = load32(row + 2 * t, width - t);
    const __m512i exponent = _mm512_set1_epi16(TERMS == 1 ? 0x7f80 : 0x7c00);
    *bad |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent);
    if constexpr (TERMS == 1) terms[0] = x;
    else split<2>(low_half(x), high_half(x), terms);
  }
  // dst[plane][row][width padded], rows from n up to `padded_rows` 0; the sign of every element flipped on demand
  static bool pack_plain(const char *const *rows, int64_t n, int64_t padded_rows, int64_t width, char *dst, int64_t plane,
                         __m512i flip) {
    __mmask32 bad = 0;
    for (int64_t r = 0; r < padded_rows; r++)
      for (int64_t t = 0; t < padded(width); t += 32) {
        __m512i terms[TERMS] = {};
        if (r < n) read(rows[r], t, width, &bad, terms);
        char *at = dst + (r * padded(width) + t) * 2;
        UNROLL for (int i = 0; i < TERMS; i++)
          _mm512_storeu_si512(at + i * plane, r < n ? _mm512_xor_si512(terms[i], flip) : terms[i]);
      }
    return !bad;
  }
  // dst[plane][row / 2][width padded][2]
  static bool pack_pairs(const char *const *rows, int64_t n, int64_t padded_rows, int64_t width, char *dst, int64_t plane) {
    __mmask32 bad = 0;
    for (int64_t r = 0; r < padded_rows; r += 2)
      for (int64_t t = 0; t < padded(width); t += 32) {
        __m512i even[TERMS] = {}, odd[TERMS] = {};
        if (r < n) read(rows[r], t, width, &bad, even);
        if (r + 1 < n) read(rows[r + 1], t, width, &bad, odd);
        char *at = dst + (r / 2 * padded(width) + t) * 4;
        UNROLL for (int i = 0; i < TERMS; i++) {
          _mm512_storeu_si512(at + i * plane, interleave_rows(even[i], odd[i], false));
          _mm512_storeu_si512(at + i * plane + 64, interleave_rows(even[i], odd[i], true));
        }
      }
    return !bad;
  }

  // two copies: plain rows, then their words of two elements transposed, [NQ][width / 2] to [width / 2][NQ]
  static int64_t lanes_bytes(int64_t width) { return padded(width) * NQ * 2 * TERMS * 2; }
  static bool pack_lanes(const char *const *rows, int64_t n, int64_t width, char *dst, float sign) {
    const int64_t row_bytes = padded(width) * 2, plane = row_bytes * NQ;
    char *plain = dst + TERMS * plane;
    const __m512i flip = _mm512_set1_epi16(sign < 0 ? (short)0x8000 : 0);
    const bool is_good = pack_plain(rows, n, NQ, width, plain, plane, flip);
    if (sign == 0) memset(plain, 0, (size_t)(TERMS * plane));
    for (int64_t i = 0; i < TERMS; i++)
      for (int64_t l = 0; l < NQ; l += 8)
        for (int64_t t = 0; t < row_bytes; t += 32)
          transpose_words(plain + i * plane + l * row_bytes + t, row_bytes, dst + i * plane + t / 4 * NQ * 4 + l * 4, NQ * 4);
    return is_good;
  }
  static int64_t rows_bytes(int64_t n, int64_t width) { return padded(n) * padded(width) * 2 * TERMS; }
  static bool pack_rows(const char *const *rows, int64_t n, int64_t capacity, int64_t width, char *dst) {
    return pack_plain(rows, n, padded(n), width, dst, rows_bytes(capacity, width) / TERMS, _mm512_setzero_si512());
  }
  // [plane][width padded][capacity]: two steps, pairs of keys as words, then their transposition
  static int64_t columns_bytes(int64_t n, int64_t width) { return padded(n) * padded(width) * 2 * TERMS * 2; }
  static bool pack_columns(const char *const *rows, int64_t n, int64_t capacity, int64_t width, char *dst) {
    const int64_t plane = padded(capacity) * padded(width) * 2;
    char *pairs = dst + TERMS * plane;
    const bool is_good = pack_pairs(rows, n, padded(n), width, pairs, plane);
    for (int64_t i = 0; i < TERMS; i++)
      for (int64_t r = 0; r < padded(n) / 2; r += 8)
        for (int64_t t = 0; t < padded(width); t += 8)
          transpose_words(pairs + i * plane + r * padded(width) * 4 + t * 4, padded(width) * 4,
                          dst + i * plane + t * padded(capacity) * 2 + r * 4, padded(capacity) * 2);
    return is_good;
  }
  static int64_t sum_width(int64_t width) { return padded(width); }
  static int64_t outer_bytes(int64_t rows, int64_t width) { return padded(rows) * padded(width) * 2 * TERMS; }
  static bool pack_outer(const char *const *rows, int64_t n, int64_t row, int64_t capacity, int64_t width, char *dst) {
    return pack_pairs(rows, n, NQ, width, dst + row / 2 * padded(width) * 4, outer_bytes(capacity, width) / TERMS);
  }

  static void scores(const char *rows, int64_t capacity, const char *lanes, int64_t n, int64_t width, float *tile,
                     float *row_max, int64_t) {
    const int64_t row_bytes = padded(width) * 2;
    for (int64_t m = 0; m < padded(n); m += 32)
      tile_block<TERMS, false, true>({rows + m * row_bytes, row_bytes, rows_bytes(capacity, width) / TERMS},
                                     {lanes, NQ * 4, row_bytes * NQ}, padded(width) / 32, tile + m * NQ, NQ * 4);
    if (row_max) raise_maxima(tile, n, row_max);
  }
  static void raise_maxima(const float *tile, int64_t n, float *row_max) {
    vf top0 = load(row_max), top1 = load(row_max + VW);
    for (int64_t key = 0; key < n; key++) {
      top0 = maximum(top0, load(tile + key * NQ));
      top1 = maximum(top1, load(tile + key * NQ + VW));
    }
    store(row_max, top0);
    store(row_max + VW, top1);
  }

  static int64_t weights_bytes(int64_t n) { return padded(n) * NQ * 2 * TERMS; }
  static AI void store_pairs(char *at, int64_t plane, __m512 even, __m512 odd) {
    __m512i terms[TERMS];
    split<TERMS>(even, odd, terms);
    UNROLL for (int i = 0; i < TERMS; i++) _mm512_storeu_si512(at + i * plane, interleave_halves(terms[i]));
  }
  static const char *pack_weights(const float *tile, int64_t n, char *dst) {
    const __m512 zero = _mm512_setzero_ps();
    for (int64_t r = 0; r < padded(n); r += 2)
      UNROLL for (int j = 0; j < NV; j++) {
        const float *at = tile + r * NQ + j * VW;
        store_pairs(dst + r / 2 * NQ * 4 + j * 64, padded(n) * NQ * 2, r < n ? (__m512)load(at) : zero,
                    r + 1 < n ? (__m512)load(at + NQ) : zero);
      }
    return dst;
  }
  // As exponentials() and pack_weights(), without writing the float32 weights.
  NOINLINE static const char *pack_exponentials(const float *tile, int64_t n, float factor, const float *subtrahend,
                                                float *row_sum, char *dst) {
    const int64_t plane = padded(n) * NQ * 2;
    const vf f = splat(factor), minus[NV] = {load(subtrahend), load(subtrahend + VW)};
    vf sum[NV] = {load(row_sum), load(row_sum + VW)};
    for (int64_t lo = 0; lo < padded(n); lo += 32) {  // a sum of sums of 32 is more exact than one long sum
      vf even_sum[NV] = {}, odd_sum[NV] = {};
      const float *at = tile + lo * NQ;
      char *to = dst + lo / 2 * NQ * 4;
      for (int64_t r = lo; r < lo + 32; r += 2, at += 2 * NQ, to += NQ * 4)
        UNROLL for (int j = 0; j < NV; j++) {
          vf even = {}, odd = {};
          if (r < n) even_sum[j] += even = exp2_of<false>((load(at + j * VW) - minus[j]) * f);
          if (r + 1 < n) odd_sum[j] += odd = exp2_of<false>((load(at + NQ + j * VW) - minus[j]) * f);
          store_pairs(to + j * 64, plane, (__m512)even, (__m512)odd);
        }
      UNROLL for (int j = 0; j < NV; j++) sum[j] += even_sum[j] + odd_sum[j];
    }
    UNROLL for (int j = 0; j < NV; j++) store(row_sum + j * VW, sum[j]);
    return dst;
  }
  static int64_t acc_rows(int64_t width) { return padded(width); }
  static void accumulate(const char *columns, int64_t capacity, const char *weights, int64_t n, int64_t width,
                         float *acc, const float *alpha, int64_t) {
    const int64_t stride = padded(capacity) * 2;
    for (int64_t at = 0; alpha && at < padded(width) * NQ; at += NQ)
      UNROLL for (int j = 0; j < NV; j++) store(acc + at + j * VW, load(acc + at + j * VW) * load(alpha + j * VW));
    for (int64_t m = 0; m < padded(width); m += 32)
      tile_block<TERMS, true, false>({columns + m * stride, stride, padded(width) * stride},
                                     {weights, NQ * 4, weights_bytes(n) / TERMS}, padded(n) / 32, acc + m * NQ, NQ * 4);
  }

  // dst[plane][key][lanes of all panels]
  static int64_t outer_weights_bytes(int64_t n, int64_t block_rows) { return padded(n) * block_rows * 2 * TERMS; }
  static void pack_outer_weights(const float *tile, int64_t n, int64_t panel, int64_t block_rows, char *dst, int64_t plane) {
    for (int64_t r = 0; r < n; r++) {
      __m512i terms[TERMS];
      split<TERMS>((__m512)load(tile + r * NQ), (__m512)load(tile + r * NQ + VW), terms);
      UNROLL for (int i = 0; i < TERMS; i++)
        _mm512_storeu_si512(dst + i * plane + (r * block_rows + panel * NQ) * 2, terms[i]);
    }
  }
  static void outer(const float *, int64_t, const char *weights, int64_t plane, int64_t first, int64_t last, int64_t,
                    int64_t lo, int64_t hi, const char *outer, int64_t block_rows, int64_t width, float *sum, int64_t stride) {
    const int64_t row_bytes = padded(width) * 4, outer_plane = outer_bytes(block_rows, width) / TERMS;
    for (int64_t m = lo; m < hi; m += 32)
      for (int64_t t = 0; t < padded(width); t += 32) {
        const Tiles a = {weights + (m * block_rows + first * NQ) * 2, block_rows * 2, plane};
        const Tiles b = {outer + first * NQ / 2 * row_bytes + t * 4, row_bytes, outer_plane};
        const int64_t chunks = last - first;
        if (m + 32 <= hi) {
          tile_block<TERMS, true, false>(a, b, chunks, sum + m * stride + t, stride * 4);
          continue;
        }
        alignas(64) float rest[32 * 32];  // rows beyond the end belong to another key block, or to nobody
        tile_block<TERMS, false, false>(a, b, chunks, rest, 128);
        for (int64_t r = 0; m + r < hi; r++)
          for (int64_t j = 0; j < 32; j++) sum[(m + r) * stride + t + j] += rest[r * 32 + j];
      }
  }
};
