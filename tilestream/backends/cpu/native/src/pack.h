// Copies between tensors and the packed float32 operands of the FMA engine, converting the element type on the way.
#pragma once
#include "call.h"
#include "simd.h"

// Collects x * 0, which is NaN as soon as one x was infinite or NaN.
struct FiniteCheck {
  v8 sum = {};
  AI void see(v8 x) { sum += x * 0.f; }
  AI bool is_finite() const {
    float total = 0;
    for (int t = 0; t < 8; t++) total += sum[t];
    return total == 0.f;
  }
};

// r[t] = factor * rows[0..8)[t] for eight columns from `at` on, of which `w` exist; rows from n on are 0.
template <class E>
static AI void load_square(const char *const *rows, int64_t n, int64_t at, int64_t w, float factor, v8 *r,
                           FiniteCheck *check) {
  UNROLL for (int i = 0; i < 8; i++) {
    r[i] = i < n ? load8((const E *)rows[i] + at, w) * factor : (v8){};
    check->see(r[i]);
  }
  transpose8(r);
}

// dst[t][lane] = factor * rows[lane][t] for `lanes` lanes (a multiple of 8) at distance `ldd`; rows from n on are 0.
template <class E>
static bool pack_transposed(const char *const *rows, int64_t n, int64_t lanes, int64_t width, float *dst, int64_t ldd,
                            float factor) {
  FiniteCheck check;
  for (int64_t l = 0; l < lanes; l += 8)
    for (int64_t t = 0; t < width; t += 8) {
      const int64_t w = min64(8, width - t);
      v8 r[8];
      load_square<E>(rows + l, n - l, t, w, factor, r, &check);
      if (w == 8) {
        UNROLL for (int i = 0; i < 8; i++) *(v8_any *)(dst + (t + i) * ldd + l) = r[i];
      } else {
        for (int64_t i = 0; i < w; i++) *(v8_any *)(dst + (t + i) * ldd + l) = r[i];
      }
    }
  return check.is_finite();
}

// dst[row / MR][t][row % MR]: keys or values as the broadcast operand of the scores. Row n + is 0 up to a full panel.
template <class E>
static bool pack_row_panels(const char *const *rows, int64_t n, int64_t width, float *dst) {
  FiniteCheck check;
  for (int64_t l = 0; l < n; l += 8)
    for (int64_t t = 0; t < width; t += 8) {
      const int64_t w = min64(8, width - t);
      v8 r[8];
      load_square<E>(rows + l, n - l, t, w, 1.f, r, &check);
      for (int64_t i = 0; i < w; i++) {
        if (MR == 8) {
          *(v8_any *)(dst + l * width + (t + i) * 8) = r[i];
        } else {
          float *p = dst + l * width + (t + i) * 4;
          *(v4_any *)p = __builtin_shufflevector(r[i], r[i], 0, 1, 2, 3);
          if (l + 4 < n) *(v4_any *)(p + width * 4) = __builtin_shufflevector(r[i], r[i], 4, 5, 6, 7);
        }
      }
    }
  return check.is_finite();
}

// dst[t / P][row][t % P], `capacity` rows to a panel, the last panel filled with 0: columns as rows of the broadcast
// operand (P = MR), or as lanes (P = ND).
template <class E, int P>
static bool pack_column_panels(const char *const *rows, int64_t n, int64_t width, float *dst, int64_t capacity,
                               float factor) {
  FiniteCheck check;
  for (int64_t i = 0; i < n; i++)
    for (int64_t t = 0; t < round_up(width, P); t += 8) {
      v8 x = t < width ? load8((const E *)rows[i] + t, width - t) * factor : (v8){};
      check.see(x);
      float *p = dst + (t / P) * capacity * P + i * P + t % P;
      if (P >= 8) {
        *(v8_any *)p = x;
      } else {
        *(v4_any *)p = __builtin_shufflevector(x, x, 0, 1, 2, 3);
        if (t + 4 < round_up(width, P)) *(v4_any *)(p + capacity * P) = __builtin_shufflevector(x, x, 4, 5, 6, 7);
      }
    }
  return check.is_finite();
}

// rows[lane][t] = src[t][lane] * factor[lane], the way back of pack_transposed.
template <class E>
static bool unpack_transposed(const float *src, int64_t lds, int64_t n, int64_t lanes, int64_t width,
                              char *const *rows, const float *factor) {
  FiniteCheck check;
  for (int64_t l = 0; l < lanes && l < n; l += 8)
    for (int64_t t = 0; t < width; t += 8) {
      const int64_t w = min64(8, width - t);
      v8 r[8];
      for (int64_t i = 0; i < 8; i++)
        r[i] = i < w ? *(const v8_any *)(src + (t + i) * lds + l) * *(const v8_any *)(factor + l) : (v8){};
      transpose8(r);
      for (int64_t i = 0; i < 8 && l + i < n; i++) {
        check.see(r[i]);
        store8((E *)rows[l + i] + t, r[i], w);
      }
    }
  return check.is_finite();
}

// row[t] = sum[t] * factor
template <class E>
static void store_row(const float *sum, int64_t width, float factor, char *row, FiniteCheck *check) {
  for (int64_t t = 0; t < width; t += 8) {
    const v8 x = load8((const f32 *)sum + t, width - t) * factor;
    check->see(x);
    store8((E *)row + t, x, width - t);
  }
}

template <class E> static float dot_rows(const char *a, const char *b, int64_t width) {
  v8 sum = {};
  for (int64_t t = 0; t < width; t += 8)
    sum += load8((const E *)a + t, width - t) * load8((const E *)b + t, width - t);
  return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}
