// The register-tiled products of the FMA engine; all operands are packed, so that every stride is a constant.
#pragma once
#include "simd.h"

// Register tiles: MR rows (broadcast operand) x NV vectors (lanes); MR * NV accumulators, NV lanes, one broadcast.
#if VW == 16
static constexpr int MR = 8, NV = 2, MRD = 12, NVD = 2;  // 16 + 2 + 1 of 32 registers; a panel of 32 suits AMX too
#elif VW == 8
static constexpr int MR = 4, NV = 3, MRD = 6, NVD = 2;  // 12 + 3 + 1 of 16
#else
static constexpr int MR = 8, NV = 2, MRD = 8, NVD = 2;  // 16 + 2 + 1 of 32
#endif
static constexpr int NQ = NV * VW, ND = NVD * VW;

enum Store { SET, ADD, SCALE };  // C = AB, C += AB, C = alpha * C + AB

// C[MR][NQ] (op) sum_t A[t][MR] B[t][NQ]; row_max (NQ,) is raised to the column maxima where it is not null.
template <Store MODE, bool MAX>
static AI void tile_product(const float *__restrict A, const float *__restrict B, float *__restrict C, int64_t T,
                            const float *__restrict alpha, float *__restrict row_max) {
  vf acc[MR][NV];
  UNROLL for (int m = 0; m < MR; m++) UNROLL for (int j = 0; j < NV; j++) acc[m][j] = (vf){};
  const float *const end = B + T * NQ;
  NO_UNROLL do {
    vf b[NV];
    UNROLL for (int j = 0; j < NV; j++) { b[j] = load(B + j * VW); IN_REGISTER(b[j]); }
    UNROLL for (int m = 0; m < MR; m++) {
      vf a = splat(A[m]);
      UNROLL for (int j = 0; j < NV; j++) FMA(acc[m][j], a, b[j]);
    }
    A += MR;
    B += NQ;
  } while (B != end);
  if (MAX) UNROLL for (int j = 0; j < NV; j++) {
    vf top = load(row_max + j * VW);
    UNROLL for (int m = 0; m < MR; m++) top = maximum(top, acc[m][j]);
    store(row_max + j * VW, top);
  }
  UNROLL for (int m = 0; m < MR; m++) UNROLL for (int j = 0; j < NV; j++) {
    float *c = C + m * NQ + j * VW;
    if (MODE == SET) store(c, acc[m][j]);
    if (MODE == ADD) store(c, load(c) + acc[m][j]);
    if (MODE == SCALE) store(c, load(c) * load(alpha + j * VW) + acc[m][j]);
  }
}
// The same for P panels of A where only the first vector of lanes is wanted. The others of B are taken for 0, and only set.
template <Store MODE, bool MAX, int P>
static AI void narrow_tile(const float *__restrict A, int64_t a_panel, const float *__restrict B, float *__restrict C,
                           int64_t T, const float *__restrict alpha, float *__restrict row_max) {
  vf acc[P * MR];
  UNROLL for (int m = 0; m < P * MR; m++) acc[m] = (vf){};
  const float *const end = B + T * NQ;
  NO_UNROLL do {
    vf b = load(B);
    IN_REGISTER(b);
    UNROLL for (int m = 0; m < P * MR; m++) FMA(acc[m], splat(A[m / MR * a_panel + m % MR]), b);
    A += MR;
    B += NQ;
  } while (B != end);
  if (MAX) {
    vf top = load(row_max);
    UNROLL for (int m = 0; m < P * MR; m++) top = maximum(top, acc[m]);
    store(row_max, top);
    for (int j = 1; j < NV; j++) store(row_max + j * VW, maximum(load(row_max + j * VW), (vf){}));
  }
  UNROLL for (int m = 0; m < P * MR; m++) {
    float *c = C + m * NQ;
    if (MODE == SET) store(c, acc[m]);
    if (MODE == SET) UNROLL for (int j = 1; j < NV; j++) store(c + j * VW, (vf){});
    if (MODE == ADD) store(c, load(c) + acc[m]);
    if (MODE == SCALE) store(c, load(c) * load(alpha) + acc[m]);
  }
}
template <Store MODE, bool MAX>
NOINLINE static void narrow_product(int64_t panels, const float *A, int64_t a_panel, const float *B, float *C, int64_t T,
                                    const float *alpha, float *row_max) {
  for (; panels > 1; panels -= 2, A += 2 * a_panel, C += 2 * MR * NQ)
    narrow_tile<MODE, MAX, 2>(A, a_panel, B, C, T, alpha, row_max);
  if (panels > 0) narrow_tile<MODE, MAX, 1>(A, a_panel, B, C, T, alpha, row_max);
}

// tile_product over `panels` panels of A, `a_panel` floats apart; C has MR rows per panel. Only the first `lanes` lanes
// are wanted: the others of B are 0 where C is set, and of C they need not be added to.
template <Store MODE, bool MAX>
NOINLINE static void product(int64_t panels, const float *A, int64_t a_panel, const float *B, float *C, int64_t T,
                             const float *alpha, float *row_max, int64_t lanes) {
  // Where a panel is a power of two (NV == 2), blocks of such sizes fill theirs.
  if (lanes <= VW && NV > 2) return narrow_product<MODE, MAX>(panels, A, a_panel, B, C, T, alpha, row_max);
  for (int64_t p = 0; p < panels; p++, A += a_panel, C += MR * NQ)
    tile_product<MODE, MAX>(A, B, C, T, alpha, row_max);
}

// C[MRD][ND] (op) sum over panels p and lanes t of A[p][m][t] B[p][t][ND], `lanes` in all, so that the last panel may have
// fewer: rows of A are rows of score tiles (NQ apart).
template <Store MODE>
static AI void outer_tile(const float *__restrict A, int64_t a_panel, const float *__restrict B, float *__restrict C,
                          int64_t ldc, int64_t lanes) {
  vf acc[MRD][NVD];
  UNROLL for (int m = 0; m < MRD; m++) UNROLL for (int j = 0; j < NVD; j++) acc[m][j] = (vf){};
  for (; lanes > 0; lanes -= NQ, A += a_panel - NQ) {
    const float *const end = A + min64(lanes, NQ);
    NO_UNROLL do {
      vf b[NVD];
      UNROLL for (int j = 0; j < NVD; j++) { b[j] = load(B + j * VW); IN_REGISTER(b[j]); }
      UNROLL for (int m = 0; m < MRD; m++) {
        vf a = splat(A[m * NQ]);
        UNROLL for (int j = 0; j < NVD; j++) FMA(acc[m][j], a, b[j]);
      }
      A += 1;
      B += ND;
    } while (A != end);
  }
  UNROLL for (int m = 0; m < MRD; m++) UNROLL for (int j = 0; j < NVD; j++) {
    float *c = C + m * ldc + j * VW;
    store(c, MODE == ADD ? load(c) + acc[m][j] : acc[m][j]);
  }
}
// C[rows][width] += A^T-like product over score tiles of `lanes` lanes; B (width / ND panels, b_panel apart) holds row lanes.
NOINLINE static void outer_product(int64_t rows, int64_t width, const float *A, int64_t a_panel, int64_t lanes,
                                   const float *B, int64_t b_panel, float *C, int64_t ldc) {
  for (int64_t t = 0; t < width; t += ND, B += b_panel, C += ND) {
    int64_t m = 0;
    for (; m + MRD <= rows; m += MRD) outer_tile<ADD>(A + m * NQ, a_panel, B, C + m * ldc, ldc, lanes);
    if (m == rows) continue;
    float last[MRD * ND];  // rows beyond the end must not be touched: they belong to another key block, or to nobody
    outer_tile<SET>(A + m * NQ, a_panel, B, last, ND, lanes);
    for (int64_t r = 0; m + r < rows; r++)
      for (int64_t j = 0; j < ND; j++) C[(m + r) * ldc + j] += last[r * ND + j];
  }
}
