// Exact attention on a CPU, tiled for registers and caches: one source, compiled once per instruction set.
#include "backward.h"
#include "call.h"
#include "decode.h"
#include "engine_fma.h"
#include "forward.h"
#include "peaks.h"
#if defined(__AMX_BF16__) || defined(__AMXBF16__)  // GCC's name, and Clang 14's
#include "engine_amx.h"
#define HAS_AMX 1
template <class E> struct Best { typedef Amx<E> Engine; };
template <> struct Best<f32> { typedef Fma<f32> Engine; };
#else
#define HAS_AMX 0
template <class E> struct Best { typedef Fma<E> Engine; };
#endif

EXPORT int tilestream_forward(const Call *call) {
  int status = STATUS_OK;
  const bool is_decode = !call->lists && extent_of(*call).rows <= DECODE_ROWS;
  WITH_DTYPE(call->dtype, typedef Best<E>::Engine Engine;
             status = is_decode ? forward<DecodeTask<E>>(*call, 1)
                                : forward<ForwardTask<Engine>>(*call, Engine::BLOCK_PANELS));
  return status;
}
EXPORT int tilestream_backward(const Call *call) {
  int status = STATUS_OK;
  WITH_DTYPE(call->dtype, status = backward<Best<E>::Engine>(*call));
  return status;
}
EXPORT void tilestream_join(void *parallel) {
  pool_register();  // before any fork: GNU OpenMP would hang in the child
  gomp_parallel = (GompParallel)parallel;
}
EXPORT int64_t tilestream_abi(void) { return (int64_t)(sizeof(Call) + sizeof(Lists)); }
EXPORT int64_t tilestream_usable(void) {
#if HAS_AMX
  return amx_permission();
#else
  return 1;
#endif
}
EXPORT int64_t tilestream_tile_shape(int64_t dtype, int64_t backward) {
  int64_t shape = 0;
  WITH_DTYPE(dtype, typedef Best<E>::Engine Engine; const int64_t panels = backward ? Engine::BACKWARD_PANELS
                                                                                   : Engine::BLOCK_PANELS;
             shape = panels * NQ << 32 | (backward ? Engine::BACKWARD_N : Engine::BLOCK_N));
  return shape;
}
