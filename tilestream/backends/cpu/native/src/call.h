// The C ABI: one struct of 8-byte fields that Python packs (call.py, same order), and the entry points.
// No torch, no Python: pointers, sizes, strides. Strides count elements; the last dimension is contiguous.
#pragma once
#include <stdint.h>

enum { DTYPE_F32 = 0, DTYPE_BF16 = 1, DTYPE_F16 = 2, DTYPE_F64 = 3 };
enum { STATUS_OK = 0, STATUS_NOT_FINITE = 1, STATUS_NO_MEMORY = 2 };

// A block mask as tilestream/block_mask/tiles.py has it (there is what the fields mean), and how a call is cut by it.
struct Lists {
  const int32_t *offsets, *columns, *patterns, *order;
  const uint32_t *bits;
  int64_t tile_m, tile_n;      // queries, a multiple of 4 keys
  int64_t num_rows;            // of a plane
  int64_t plane_strides[2];    // batch, query head
  int64_t packed_heads;        // query heads whose rows are packed: all of a KV head, or 1
};
struct Call {
  // inputs
  const char *query, *key, *value;  // (batch, seqlen, heads, width) or packed (total, heads, width)
  const char *bias;                 // broadcastable to (batch, heads_q, seqlen_q, seqlen_k): strides of 0; or null
  const float *alibi;               // slopes, strides (batch, head); or null
  const float *sinks;               // (heads_q,); or null
  const int32_t *cu_seqlens_q, *cu_seqlens_k;  // (batch + 1,); null for dense calls
  // forward: written; backward: read
  char *out;
  float *lse;
  // backward
  const char *dout;
  const float *dlse;    // or null
  char *dq, *dk, *dv;
  float *dbias;            // zeroed float32, strides of 0 where summed; or null
  float *delta;            // (as lse) written where not null: rowsum(out * dout) - dlse
  int64_t dtype, bias_dtype, num_threads;
  int64_t batch, num_heads_q, num_heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v;
  int64_t query_strides[3], key_strides[3], value_strides[3], out_strides[3];  // batch, token, head
  int64_t dout_strides[3], dq_strides[3], dk_strides[3], dv_strides[3];
  int64_t bias_strides[4], dbias_strides[4];
  int64_t alibi_strides[2], lse_strides[2], dlse_strides[3];  // (batch, head); lse and delta are contiguous along tokens
  // key j is visible to query i iff -left <= j - (i + shift) <= right; NO_LIMIT for None. Packed: shift is per sequence.
  int64_t left, right, shift;
  int64_t seed, keep_threshold;  // keep_threshold 2^32: no dropout
  double scale, softcap, dropout_p;
  const Lists *lists;  // of a block mask, or null. Dense: they hold the band too, and left and right are NO_LIMIT.
};
#define NO_LIMIT (INT64_C(1) << 61)

#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT int tilestream_forward(const Call *call);
EXPORT int tilestream_backward(const Call *call);
EXPORT int64_t tilestream_abi(void);                                           // sizeof(Call) + sizeof(Lists), checked at loading
EXPORT void tilestream_join(void *gomp_parallel);                              // threads of GNU OpenMP; null: own threads
EXPORT int64_t tilestream_usable(void);                                        // 1 if this process may run it (AMX needs a permission)
EXPORT int64_t tilestream_tile_shape(int64_t dtype, int64_t backward);         // block_m << 32 | block_n
