// Vector types of the instruction set, loads and stores of every element type, 2^x, tanh, 8x8 transposes.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#include "call.h"
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define VW 16
#elif defined(__AVX2__)
#define VW 8
#else
#define VW 4
#endif
#define AI __attribute__((always_inline)) inline
#define NOINLINE __attribute__((noinline))
#define UNROLL _Pragma("GCC unroll 32")
#define NO_UNROLL _Pragma("GCC unroll 1")

typedef float vf __attribute__((vector_size(VW * 4)));
typedef int32_t vi __attribute__((vector_size(VW * 4)));
typedef uint32_t vu __attribute__((vector_size(VW * 4)));
typedef float vf_any __attribute__((vector_size(VW * 4), aligned(4)));
typedef float v8 __attribute__((vector_size(32)));
typedef float v8_any __attribute__((vector_size(32), aligned(4)));
typedef float v4_any __attribute__((vector_size(16), aligned(4)));
typedef uint32_t u8 __attribute__((vector_size(32)));
typedef uint16_t h8 __attribute__((vector_size(16)));
typedef uint16_t h8_any __attribute__((vector_size(16), aligned(2)));

static const float LOG2E = 1.44269504088896340736f;

static AI vf load(const float *p) { return *(const vf_any *)p; }
static AI void store(float *p, vf x) { *(vf_any *)p = x; }
static AI vf splat(float x) { return x - (vf){}; }
static AI vi splat_int(int32_t x) { return x - (vi){}; }
static AI vf select(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
static AI int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static AI int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
static AI int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

// maximum(a, b): NaN if b is NaN, whatever a is. Intrinsics, because GCC makes a compare and a blend of a ternary.
#if VW == 16
static AI vf maximum(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
#elif VW == 8
static AI vf maximum(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
#else
static AI vf maximum(vf a, vf b) { return (vf)vmaxq_f32((float32x4_t)a, (float32x4_t)b); }
#endif

// Keeps an operand in a register: GCC would fold one load into several FMAs (62 % of peak instead of 85 %).
#if defined(__x86_64__)
#define IN_REGISTER(v) __asm__("" : "+v"(v))
#else
#define IN_REGISTER(v) __asm__("" : "+w"(v))
#endif
// One instruction with a tied accumulator: with plain C both GCC and Clang spill when all registers are in use.
#if defined(__x86_64__)
#define FMA(c, a, b) __asm__("vfmadd231ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b))
#else
#define FMA(c, a, b) c += a * b
#endif

// ---- 2^x for x <= 127: exactly 0 below -126.5 (so also for -inf), NaN for NaN. Relative error 7.9e-8 and 2.9e-6.
// Adding the constant rounds x to an integer n and leaves n + 127 in the low bits, where the exponent is shifted from.
static const float ROUNDER = 12582912.f + 127.f;
template <bool PRECISE> static AI vf exp2_minus_one(vf f) {  // |f| <= 1/2
  vf p;
  if constexpr (PRECISE) {
    p = splat(1.535336196e-04f);
    p = p * f + splat(1.339887502e-03f);
    p = p * f + splat(9.618436918e-03f);
    p = p * f + splat(5.550332367e-02f);
    p = p * f + splat(2.402264774e-01f);
    p = p * f + splat(6.931471825e-01f);
  } else {
    p = splat(9.582852945e-03f);
    p = p * f + splat(5.590642616e-02f);
    p = p * f + splat(2.402409911e-01f);
    p = p * f + splat(6.931241751e-01f);
  }
  return p * f;
}
template <bool PRECISE> static AI vf exp2_of(vf x) {
  x = maximum(splat(-127.f), x);
  vf t = x + splat(ROUNDER), n = t - splat(ROUNDER);
  return (exp2_minus_one<PRECISE>(x - n) + splat(1.f)) * (vf)((vi)t << 23);
}
// tanh through expm1(2|x|) = 2^n - 1 + 2^n (2^f - 1): relative accuracy near 0, where 1 - 2 / (e^2x + 1) cancels.
static AI vf tanh_of(vf x) {
  vf magnitude = (vf)((vi)x & splat_int(0x7fffffff));
  vf y = magnitude * splat(2.f * LOG2E);
  y = (vf)select(y > splat(40.f), splat(40.f), y);  // keeps NaN
  vf t = y + splat(ROUNDER), n = t - splat(ROUNDER), f = y - n;
  vf scale = (vf)((vi)t << 23), e = (scale - splat(1.f)) + scale * exp2_minus_one<true>(f);
  vf result = e / (e + splat(2.f));
  return (vf)((vi)result | ((vi)x & splat_int((int32_t)0x80000000)));
}

// ---- element types
struct f32 { float v; };
struct bf16 { uint16_t v; };
struct f16 { uint16_t v; };
struct f64 { double v; };

static AI v8 load8(const f32 *p) { return *(const v8_any *)p; }
static AI v8 load8(const bf16 *p) { return (v8)(__builtin_convertvector(*(const h8_any *)p, u8) << 16); }
static AI v8 load8(const f64 *p) {
  v8 x;
  for (int t = 0; t < 8; t++) x[t] = (float)p[t].v;
  return x;
}
static AI void store8(f32 *p, v8 x) { *(v8_any *)p = x; }
static AI u8 round_bf16(v8 x) {  // to nearest even; the result in the low halves
  u8 bits = (u8)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, is_nan = (u8)(x != x);
  return (rounded & ~is_nan) | (((bits >> 16) | 0x40) & is_nan);
}
static AI void store8(bf16 *p, v8 x) { *(h8_any *)p = __builtin_convertvector(round_bf16(x), h8); }
#if defined(__x86_64__)
static AI v8 load8(const f16 *p) { return (v8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
static AI void store8(f16 *p, v8 x) { _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)x, 0)); }
#else
static AI v8 load8(const f16 *p) {
  float32x4_t lo = vcvt_f32_f16(vld1_f16((const __fp16 *)p)), hi = vcvt_f32_f16(vld1_f16((const __fp16 *)p + 4));
  v8 x;
  memcpy(&x, &lo, 16);
  memcpy((char *)&x + 16, &hi, 16);
  return x;
}
static AI void store8(f16 *p, v8 x) {
  float32x4_t lo, hi;
  memcpy(&lo, &x, 16);
  memcpy(&hi, (const char *)&x + 16, 16);
  vst1_f16((__fp16 *)p, vcvt_f16_f32(lo));
  vst1_f16((__fp16 *)p + 4, vcvt_f16_f32(hi));
}
#endif
// The first n of 8 elements, without touching memory beyond them; zeros after.
template <class E> static AI v8 load8(const E *p, int64_t n) {
  if (n >= 8) return load8(p);
  E part[8] = {};
  for (int64_t t = 0; t < n; t++) part[t] = p[t];
  return load8(part);
}
template <class E> static AI void store8(E *p, v8 x, int64_t n) {
  if (n >= 8) return store8(p, x);
  E part[8];
  store8(part, x);
  for (int64_t t = 0; t < n; t++) p[t] = part[t];
}
// Runs `expression` with E as the element type of `dtype`.
#define WITH_DTYPE(dtype, ...)                                        \
  switch (dtype) {                                                    \
    case DTYPE_F32: { typedef f32 E; __VA_ARGS__; break; }            \
    case DTYPE_BF16: { typedef bf16 E; __VA_ARGS__; break; }          \
    default: { typedef f16 E; __VA_ARGS__; break; }                   \
  }
static AI int64_t size_of_dtype(int64_t dtype) { return dtype == DTYPE_F64 ? 8 : dtype == DTYPE_F32 ? 4 : 2; }

static AI void transpose8(v8 *r) {
  v8 a[8], b[8];
  UNROLL for (int i = 0; i < 4; i++) {
    a[2 * i] = __builtin_shufflevector(r[2 * i], r[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    a[2 * i + 1] = __builtin_shufflevector(r[2 * i], r[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  UNROLL for (int i = 0; i < 2; i++) {
    b[4 * i] = __builtin_shufflevector(a[4 * i], a[4 * i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
    b[4 * i + 1] = __builtin_shufflevector(a[4 * i], a[4 * i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    b[4 * i + 2] = __builtin_shufflevector(a[4 * i + 1], a[4 * i + 3], 0, 1, 8, 9, 4, 5, 12, 13);
    b[4 * i + 3] = __builtin_shufflevector(a[4 * i + 1], a[4 * i + 3], 2, 3, 10, 11, 6, 7, 14, 15);
  }
  UNROLL for (int i = 0; i < 4; i++) {
    r[i] = __builtin_shufflevector(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    r[i + 4] = __builtin_shufflevector(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}
