// What the tasks of a unit, a (sequence, KV head), share: memory, which only units in work have, and in it the keys and
// values of a block mask's tiles, packed once for all tasks.
//
// Tasks follow each other unit by unit (Plan.units_outside), and threads take them in ascending order, so a task may wait
// for those of an earlier unit.
#pragma once
#include "lists.h"
#include "pool.h"

static AI void wait_for(const int32_t *counter, int32_t value) {
  for (int64_t spin = 0; __atomic_load_n(counter, __ATOMIC_ACQUIRE) != value; spin++) {
    relax();
    if (spin > SPINS) usleep(0);
  }
}
static AI void advance(int32_t *counter) { __atomic_fetch_add(counter, 1, __ATOMIC_RELEASE); }

// The memory of all calls, or one's own where another call has that.
struct Loan {
  Arena own = {};
  const bool is_common = pthread_mutex_trylock(&common.owner) == 0;
  ~Loan() {
    if (is_common) pthread_mutex_unlock(&common.owner);
    free(own.memory);
  }
  char *reserve(int64_t bytes) { return (is_common ? &common.arena : &own)->reserve(bytes); }
};

static int64_t num_units(const Call &c) { return c.batch * c.num_heads_kv; }
static AI int64_t unit_of(const Call &c, const Task &t) { return t.sequence.batch * c.num_heads_kv + t.kv_head; }

// Places of units in memory: unit u has slot u % num, after unit u - num.
struct Slots {
  const Plan *plan;
  int64_t num;
  int32_t *ended;  // (units,): tasks that have ended
  int32_t *freed;  // (units,): 1 when the slot is the next unit's

  // As many as threads and the waves behind them can use at once.
  static int64_t wanted(const Plan &plan, int64_t row_blocks) {
    const int64_t tasks = max64(1, row_blocks * plan.members);
    return max64(1, min64(num_units(*plan.call), 2 * max64(1, plan.call->num_threads) / tasks + 2));
  }
  static int64_t num_counters(const Call &c) { return 2 * num_units(c); }
  void lay_out(int32_t *counters) { ended = counters, freed = counters + num_units(*plan->call); }
  // Every task of a unit waits, even one without work: when it has ended, so have those of the units before.
  void wait(int64_t unit) const {
    const Call &c = *plan->call;
    for (int64_t u = unit - num; u >= 0; u -= num)
      if (sequence_of(c, u / c.num_heads_kv).num_queries > 0) return wait_for(freed + u, 1);  // others have no tasks
  }
  // Whether the task is its unit's last one to end, which then has the slot for itself until it is freed.
  bool is_last(const Task &t) const {
    const int64_t num_tasks = plan->blocks_of(t.sequence.num_queries) * plan->members;
    return __atomic_add_fetch(ended + unit_of(*plan->call, t), 1, __ATOMIC_ACQ_REL) == num_tasks;
  }
  void release(int64_t unit) const { advance(freed + unit); }
};

// Keys of the largest block of whole tiles, or of equal parts of a larger tile. Tiles that are packed one by one are
// multiplied one by one, each with a pass over the sums, so pieces of them cost more (3 %).
static int64_t whole_tiles(int64_t tile_n, int64_t most) {
  if (tile_n <= most) return most / tile_n * tile_n;
  const int64_t parts = (tile_n + most - 1) / most;
  return round_up((tile_n + parts - 1) / parts, UNIT);
}

// Keys [at, at + n) of a block: packed operands in which they lie side by side, from `key` of a packed tile on, if of one.
struct Run {
  const char *tile;
  int64_t key, at, n;
  const char *rows, *value_rows, *columns;  // where these keys are; value_rows in the backward
  int64_t capacity;
};

// Tiles of keys and values, packed by the first task that needs them. Memory, for every slot: the longest sequence's rows
// of keys and columns of values (each tile's padded by 8 keys or none) as float32; in the backward rows of keys, rows of
// values and columns of keys.
struct PackedTiles {
  enum { ABSENT, IN_WORK, READY };
  Slots slots;
  int64_t num_tiles;               // of a unit; 0: none are packed
  int64_t rows_bytes, tile_bytes;  // of a tile: bytes before its columns, bytes in all
  int64_t capacity;  // keys that a tile's columns have room for; an odd multiple of 8, so that their panels, which are
                     // written side by side, do not lie a power of two apart and drive each other out of the cache
  char *memory;      // (slots, tiles)
  int32_t *states;   // (units, tiles)

  // Where a tile has two uses or more on average. By the shape and the mask alone, as the order of sums depends on it.
  static bool pays(const Plan &plan, int64_t num_tiles) {
    const Call &c = *plan.call;
    return num_listed(c) * plan.members >= 2 * num_planes(c) * num_tiles;
  }
  static int64_t capacity_for(int64_t keys) { return round_up(keys, 8) | 8; }
  int64_t bytes() const { return slots.num * num_tiles * tile_bytes; }
  int64_t num_states() const { return num_units(*slots.plan->call) * num_tiles; }
  char *at(int64_t unit, int64_t tile) const { return memory + (unit % slots.num * num_tiles + tile) * tile_bytes; }
  // True for the one task that has to pack the tile, and to call `finish`; the others get it ready.
  bool begin(int64_t unit, int64_t tile) const {
    int32_t *state = states + unit * num_tiles + tile, found = ABSENT;
    if (__atomic_load_n(state, __ATOMIC_ACQUIRE) == READY) return false;
    if (__atomic_compare_exchange_n(state, &found, IN_WORK, false, __ATOMIC_ACQUIRE, __ATOMIC_ACQUIRE)) return true;
    wait_for(state, READY);
    return false;
  }
  void finish(int64_t unit, int64_t tile) const {
    __atomic_store_n(states + unit * num_tiles + tile, READY, __ATOMIC_RELEASE);
  }
  // The pieces as runs, which pieces that follow each other in a tile are one of; returns their number. pack(column, at)
  // packs a tile.
  template <class Pack> int64_t runs_of(int64_t unit, const Piece *pieces, int64_t num, Run *runs, Pack pack) const {
    int64_t num_runs = 0;
    for (const Piece *x = pieces; x < pieces + num; x++) {
      if (x->n == 0) continue;
      char *tile = at(unit, x->column);
      if (begin(unit, x->column)) {
        pack(x->column, tile);
        finish(unit, x->column);
      }
      const int64_t key = x->k0 - x->column * slots.plan->call->lists->tile_n;
      Run *last = runs + num_runs - 1;
      if (num_runs > 0 && last->tile == tile && last->key + last->n == key) last->n += x->n;
      else runs[num_runs++] = {tile, key, x->at, x->n};
    }
    return num_runs;
  }
};
