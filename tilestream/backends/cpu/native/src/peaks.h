// What this machine can do at best: float32 FMAs of one core, bytes read from memory. The benchmark divides by these.
// Both are the best pass of several: a disturbed pass is not what the machine can do.
#pragma once
#include <time.h>
#include "call.h"
#include "pool.h"
#include "simd.h"

static double peaks_clock_s() {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Named accumulators and volatile asm: an array of them is spilled, and of plain C the compiler would move the product
// out of the loop. 12 cover two pipes of latency 5 and leave AVX2 four of its 16 registers.
#if defined(__x86_64__)
#define PEAK_FMA(i) __asm__ volatile("vfmadd231ps %2, %1, %0" : "+v"(c##i) : "v"(a), "v"(b));
#else
#define PEAK_FMA(i) __asm__ volatile("fmla %0.4s, %1.4s, %2.4s" : "+w"(c##i) : "w"(a), "w"(b));
#endif
#if VW == 8
static constexpr int NUM_ACCUMULATORS = 12;
#define EACH_ACCUMULATOR(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#else
static constexpr int NUM_ACCUMULATORS = 16;
#define EACH_ACCUMULATOR(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15)
#endif
#define PEAK_START(i) vf c##i = a;

static NOINLINE void fma_pass(int64_t rounds) {
  vf a = splat(1e-3f), b = splat(1e-3f);  // the sums stay normal numbers
  EACH_ACCUMULATOR(PEAK_START)
  for (int64_t round = 0; round < rounds; round++) {
    EACH_ACCUMULATOR(PEAK_FMA)
  }
}

// float32 GFLOP/s of the calling core, an FMA being two; passes of about a millisecond for `seconds`, one at least.
EXPORT double tilestream_fma_gflops(double seconds) {
  const int64_t rounds = 300000;
  const double end = peaks_clock_s() + seconds;
  double best = INFINITY, start = peaks_clock_s();
  do {
    fma_pass(rounds);
    const double stop = peaks_clock_s();
    best = stop - start < best ? stop - start : best;
    start = stop;
  } while (start < end);
  return 2. * VW * NUM_ACCUMULATORS * (double)rounds / best * 1e-9;
}

typedef uint64_t line64 __attribute__((vector_size(64), aligned(1)));
struct Reading {
  const char *memory;
  int64_t slice_lines;
};

// Four streams keep more misses in flight than one: 17 GB/s against 14 on a core of a Xeon with DDR5.
static NOINLINE void read_slice(void *context, int64_t task, char *) {
  const Reading *reading = (const Reading *)context;
  const int64_t stream = reading->slice_lines / 4;
  const line64 *p = (const line64 *)reading->memory + task * reading->slice_lines;
  line64 s0 = {}, s1 = {}, s2 = {}, s3 = {};
  for (int64_t t = 0; t < stream; t++) {
    s0 += p[t];
    s1 += p[t + stream];
    s2 += p[t + 2 * stream];
    s3 += p[t + 3 * stream];
  }
  const line64 sum = s0 + s1 + s2 + s3;
  __asm__ volatile("" : : "r"(&sum) : "memory");  // somebody looks at it
}

// GB/s of reading `memory` from end to end, many times larger than the caches; passes for `seconds`, one at least.
EXPORT double tilestream_read_gbps(const char *memory, int64_t bytes, int64_t num_threads, double seconds) {
  const int64_t num_slices = 8 * num_threads;  // a thread that was held up leaves its slices to the others
  Reading reading = {memory, bytes / (64 * 4 * num_slices) * 4};
  const double end = peaks_clock_s() + seconds;
  double best = INFINITY, start = peaks_clock_s();
  do {
    if (!pool_run(num_threads, num_threads, num_slices, 64, read_slice, &reading)) return NAN;
    const double stop = peaks_clock_s();
    best = stop - start < best ? stop - start : best;
    start = stop;
  } while (start < end);
  return (double)(reading.slice_lines * 64 * num_slices) / best * 1e-9;
}
