// The threads of a call. Where PyTorch's threads are GNU OpenMP's, a call joins them: that runtime's entry point is handed
// in (tilestream_join), so there is no second runtime, and no second set of threads that waits for cores while the first
// set spins on them after PyTorch's own operations. Elsewhere, and in a forked child (where GNU OpenMP would hang), the
// threads are our own. One call uses the threads at a time; a call that finds them busy runs on its own thread alone.
// Results never depend on any of this.
#pragma once
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>
#include "simd.h"

enum { MAX_THREADS = 512, SPINS = 2000 };

struct Arena {  // scratch memory of one thread, kept for the next call
  char *memory;
  int64_t size;
  char *reserve(int64_t bytes) {
    bytes = max64(bytes, 64);
    if (bytes > size) {
      free(memory);
      memory = 0;
      size = 0;
      void *fresh = 0;
      if (posix_memalign(&fresh, 4096, (size_t)round_up(bytes, 4096))) return 0;
      memory = (char *)fresh;
      size = bytes;
    }
    return memory;
  }
};

typedef void (*Work)(void *context, int64_t task, char *scratch);

static struct {
  pthread_mutex_t owner = PTHREAD_MUTEX_INITIALIZER;  // held for the length of a call
  pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;   // guards sleeping and waking
  pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
  int num_workers;      // threads besides the caller
  uint64_t generation;  // counts calls
  int wanted;           // workers that take part in this call
  int running;          // of those, not yet done
  int64_t next, num_tasks;
  Work work;
  void *context;
  Arena arenas[MAX_THREADS];
} pool;

typedef void (*GompParallel)(void (*body)(void *), void *data, unsigned num_threads, unsigned flags);
static GompParallel gomp_parallel;  // null: own threads

static AI void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  __asm__ volatile("yield");
#endif
}

static void pool_drain(Arena *arena) {
  for (int64_t task; (task = __atomic_fetch_add(&pool.next, 1, __ATOMIC_RELAXED)) < pool.num_tasks;)
    pool.work(pool.context, task, arena->memory);
}

static void *pool_worker(void *argument) {
  const int id = (int)(intptr_t)argument;
  uint64_t seen = __atomic_load_n(&pool.generation, __ATOMIC_ACQUIRE) - 1;  // the call that it was started for may be on
  for (;;) {
    for (int spin = 0; spin < SPINS && __atomic_load_n(&pool.generation, __ATOMIC_ACQUIRE) == seen; spin++) relax();
    pthread_mutex_lock(&pool.lock);
    while (pool.generation == seen) pthread_cond_wait(&pool.wake, &pool.lock);
    seen = pool.generation;
    const bool takes_part = id <= pool.wanted;
    pthread_mutex_unlock(&pool.lock);
    if (!takes_part) continue;
    pool_drain(&pool.arenas[id]);
    __atomic_fetch_sub(&pool.running, 1, __ATOMIC_RELEASE);
  }
  return 0;
}

static struct {
  pthread_mutex_t owner = PTHREAD_MUTEX_INITIALIZER;
  Arena arena;  // kept: a fresh 30 MiB in every call took ten times as long to be mapped by 16 threads as the call itself
} common;  // of shared.h

static void pool_forget() {  // in a forked child the workers are gone, and the locks may be held by nobody
  pool.num_workers = pool.wanted = pool.running = 0;  // or new workers would join a call that the parent was in
  pool.next = pool.num_tasks = 0;
  pool.generation = 0;
  gomp_parallel = 0;
  pthread_mutex_init(&pool.owner, 0);
  pthread_mutex_init(&common.owner, 0);
  pthread_mutex_init(&pool.lock, 0);
  pthread_cond_init(&pool.wake, 0);
}

static void pool_register() {
  static bool is_registered;
  if (!is_registered) is_registered = pthread_atfork(0, 0, pool_forget) == 0;
}

static void pool_start(int workers) {
  while (pool.num_workers < workers) {
    pthread_t thread;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    const int failed = pthread_create(&thread, &attributes, pool_worker, (void *)(intptr_t)(pool.num_workers + 1));
    pthread_attr_destroy(&attributes);
    if (failed) return;  // fewer threads, same results
    pool.num_workers++;
  }
}

// One thread of GNU OpenMP's team.
static void pool_member(void *) {
  const int id = __atomic_fetch_add(&pool.running, 1, __ATOMIC_RELAXED);
  if (id < pool.wanted) pool_drain(&pool.arenas[id]);
}

static void pool_signal_and_wait(int workers) {
  pthread_mutex_lock(&pool.lock);
  pool.wanted = pool.running = workers;
  __atomic_fetch_add(&pool.generation, 1, __ATOMIC_RELEASE);
  pthread_cond_broadcast(&pool.wake);
  pthread_mutex_unlock(&pool.lock);
  pool_drain(&pool.arenas[0]);
  for (int spin = 0; __atomic_load_n(&pool.running, __ATOMIC_ACQUIRE) > 0; spin++) {
    relax();
    if (spin > SPINS) usleep(0);
  }
}

static pthread_key_t own_key;  // frees a thread's own arena when the thread ends
static bool has_own_key;
static void free_own(void *own) {
  free(((Arena *)own)->memory);
  *(Arena *)own = Arena();
}
static void make_own_key() { has_own_key = pthread_key_create(&own_key, free_own) == 0; }
static Arena *own_arena() {
  static __thread Arena own;  // kept per thread: small calls must not pay for fresh pages
  if (!own.memory) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_own_key);
    if (has_own_key) pthread_setspecific(own_key, &own);
  }
  return &own;
}

// Runs work(context, task, scratch) for every task in [0, num_tasks) on `num_threads` threads (of PyTorch's `team`, see
// below) with `scratch_bytes` of memory each; a thread takes tasks in ascending order, so that a task may wait for what an
// earlier task does. False: no memory, nothing ran.
static bool pool_run(int64_t team, int64_t num_threads, int64_t num_tasks, int64_t scratch_bytes, Work work, void *context) {
  int threads = (int)min64(min64(num_threads, num_tasks), MAX_THREADS);
  if (threads <= 1 || pthread_mutex_trylock(&pool.owner) != 0) {
    char *scratch = own_arena()->reserve(scratch_bytes);
    if (!scratch) return false;
    for (int64_t task = 0; task < num_tasks; task++) work(context, task, scratch);
    return true;
  }
  pool_register();
  if (!gomp_parallel) {
    pool_start(threads - 1);
    threads = (int)min64(threads, pool.num_workers + 1);
  }
  // All memory before any work: a task that gave up halfway would leave others waiting for it.
  int ready = 0;
  while (ready < threads && pool.arenas[ready].reserve(scratch_bytes)) ready++;
  pool.work = work;
  pool.context = context;
  pool.num_tasks = num_tasks;
  __atomic_store_n(&pool.next, 0, __ATOMIC_RELAXED);
  if (gomp_parallel && ready > 0) {
    pool.wanted = ready, pool.running = 0;
    // The whole team, as PyTorch asks for it: a smaller one would end the other threads, and start them anew later.
    gomp_parallel(pool_member, 0, (unsigned)min64(team, MAX_THREADS), 0);
  } else if (ready > 0) {
    pool_signal_and_wait(ready - 1);
  }
  pthread_mutex_unlock(&pool.owner);
  return ready > 0;
}
