// The engine of float32 FMAs: which packed operands the forward and backward loops use, and their products.
// Interface (the AMX engine has the same): byte sizes of the packed operands, packing, four products.
#pragma once
#include "lists.h"

template <class E> struct Fma {
  static constexpr bool PRECISE = sizeof(E) == 4;  // 2^x to float32, or well below half precision
  // Forward: keys per block, panels per task. Backward: the same.
  static constexpr int BLOCK_N = 192, BLOCK_PANELS = 8, BACKWARD_N = 96, BACKWARD_PANELS = 8;
  static constexpr int MAX_UNIT = MR;              // `scores` gives maxima for multiples of this many keys
  // Packed tiles may be packed and used in parts of UNIT keys, which are apart as rows_at and columns_at say.
  static constexpr bool SHARES_TILES = true;
  static_assert(UNIT % MR == 0, "a part is whole panels");
  static int64_t rows_at(int64_t key, int64_t width) { return key * width * 4; }
  static int64_t columns_at(int64_t key) { return key * MR * 4; }
  static int64_t weights_at(int64_t key) { return key * NQ * 4; }
  static void begin() {}
  static void end() {}

  // queries or dout, the lane operand of the scores: [width][NQ]
  static int64_t lanes_bytes(int64_t width) { return width * NQ * 4; }
  static bool pack_lanes(const char *const *rows, int64_t n, int64_t width, char *dst, float factor) {
    return pack_transposed<E>(rows, n, NQ, width, (float *)dst, NQ, factor);
  }
  // keys or values, the row operand of the scores: [n / MR][width][MR]
  static int64_t rows_bytes(int64_t n, int64_t width) { return round_up(n, 8) * width * 4; }
  static bool pack_rows(const char *const *rows, int64_t n, int64_t, int64_t width, char *dst) {
    return pack_row_panels<E>(rows, n, width, (float *)dst);
  }
  // values or keys, whose columns become the rows of acc^T: [width / MR][n][MR]
  static int64_t columns_bytes(int64_t n, int64_t width) { return n * round_up(width, MR) * 4; }
  static bool pack_columns(const char *const *rows, int64_t n, int64_t capacity, int64_t width, char *dst) {
    return pack_column_panels<E, MR>(rows, n, width, (float *)dst, capacity, 1.f);
  }
  // tile[key][lane] = rows . lanes for n keys (rounded up to a panel), raising row_max where given;
  // lanes from `used` on are 0
  static void scores(const char *rows, int64_t, const char *lanes, int64_t n, int64_t width, float *tile, float *row_max,
                     int64_t used) {
    const int64_t panels = (n + MR - 1) / MR;
    const float *a = (const float *)rows, *b = (const float *)lanes;
    if (row_max) product<SET, true>(panels, a, width * MR, b, tile, width, 0, row_max, used);
    else product<SET, false>(panels, a, width * MR, b, tile, width, 0, 0, used);
  }
  // what `accumulate` reads in place of a tile of weights: the tile itself
  static int64_t weights_bytes(int64_t) { return 0; }
  static const char *pack_weights(const float *tile, int64_t, char *) { return (const char *)tile; }
  // 2^((tile - subtrahend) * factor) in that form, and its sums over the keys added to row_sum
  static const char *pack_exponentials(float *tile, int64_t n, float factor, const float *subtrahend, float *row_sum, char *) {
    exponentials<PRECISE>(tile, n, factor, subtrahend, row_sum);
    return (const char *)tile;
  }
  // acc[width][NQ] = alpha * acc + columns . weights; nothing reads lanes from `used` on
  static int64_t acc_rows(int64_t width) { return round_up(width, MR); }
  static void accumulate(const char *columns, int64_t capacity, const char *weights, int64_t n, int64_t width,
                         float *acc, const float *alpha, int64_t used) {
    const int64_t panels = (width + MR - 1) / MR;
    const float *a = (const float *)columns, *b = (const float *)weights;
    if (alpha) product<SCALE, false>(panels, a, capacity * MR, b, acc, n, alpha, 0, used);
    else product<ADD, false>(panels, a, capacity * MR, b, acc, n, 0, 0, used);
  }
  // queries or dout as the lane operand of dk or dv: [width / ND][rows][ND], rows = lanes of all panels
  static int64_t sum_width(int64_t width) { return round_up(width, ND); }
  static int64_t outer_bytes(int64_t rows, int64_t width) { return rows * sum_width(width) * 4; }
  static bool pack_outer(const char *const *rows, int64_t n, int64_t row, int64_t capacity, int64_t width, char *dst) {
    float *at = (float *)dst + row * ND;
    for (int64_t t = 0; t < sum_width(width); t += ND)
      memset(at + (t / ND) * capacity * ND + n * ND, 0, (size_t)(NQ - n) * ND * 4);
    return pack_column_panels<E, ND>(rows, n, width, at, capacity, 1.f);
  }
  // what `outer` reads in place of tiles of weights, for all panels: the tiles themselves
  static constexpr int OUTER_ROWS = MRD;
  static int64_t outer_weights_bytes(int64_t, int64_t) { return 0; }
  static void pack_outer_weights(const float *, int64_t, int64_t, int64_t, char *, int64_t) {}
  // sum[key][width] += weights of panels [first, last) . outer, for keys [lo, hi) of the tiles; the panels' rows are `rows`
  static void outer(const float *tiles, int64_t tile_floats, const char *, int64_t, int64_t first, int64_t, int64_t rows,
                    int64_t lo, int64_t hi, const char *outer, int64_t block_rows, int64_t width, float *sum,
                    int64_t stride) {
    outer_product(hi - lo, sum_width(width), tiles + first * tile_floats + lo * NQ, tile_floats, rows,
                  (const float *)outer + first * NQ * ND, block_rows * ND, sum + lo * stride, stride);
  }
};
