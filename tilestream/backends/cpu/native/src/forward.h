// Computes   out = softmax(scores) V and lse, for every (sequence, KV head, block of packed query rows).
// Algorithm  FlashAttention, algorithm 1 with the loops of its second version (arXiv:2205.14135, arXiv:2307.08691):
//            query rows outside, keys streamed, online softmax.
// Schedule   a task is up to `block_rows` rows in panels of NQ lanes; per key block its keys and values are packed once
//            and used by all panels; those of a block mask's tiles once per KV head (shared.h). score^T = K Q^T and
//            acc^T += V^T P^T keep queries in the lanes, so maximum, sum and rescaling never reduce across lanes. Few
//            rows: the keys are split over tasks and merged after.
// Traffic    Q and out once, K and V once per task; nothing that grows with seqlen_q * seqlen_k.
// On chip    a tile (NQ x BLOCK_N floats) in the first-level cache, packed keys and values in the second.
// Numerics   sums in float32. The largest weight of a row is 1, so a row with one key is exact whatever the weights are
//            rounded to (bfloat16 on AMX).
// Limits     finite inputs: what is not finite sets plan.not_finite, and the caller runs another backend.
#pragma once
#include "shared.h"

struct Softmax {  // the running state of one panel
  alignas(64) float row_max[NQ], row_sum[NQ];
};

struct Forward {
  Plan plan;
  Scoring scoring;
  float *parts;  // per (row, split): row_max, row_sum, acc; null without splits
  PackedTiles tiles;
  bool shares_tiles;
};

// Fold the maxima of a tile in; true where some row is rescaled, by alpha (NQ,). `subtrahend` is the new maximum, or 0.
static AI bool raise_max(Softmax *state, const float *tile_max, float factor, float *subtrahend, float *alpha) {
  vi changed = {};
  for (int64_t j = 0; j < NV; j++) {
    const vf old = load(state->row_max + j * VW);
    const vf fresh = maximum(load(tile_max + j * VW), old);
    const vf finite = select((vi)(fresh == splat(-INFINITY)), (vf){}, fresh);
    const vf scale = exp2_of<true>((old - finite) * factor);
    changed |= (vi)(scale != splat(1.f));
    store(state->row_max + j * VW, fresh);
    store(state->row_sum + j * VW, load(state->row_sum + j * VW) * scale);
    store(alpha + j * VW, scale);
    store(subtrahend + j * VW, finite);
  }
  int32_t any = 0;
  for (int t = 0; t < VW; t++) any |= changed[t];
  return any != 0;
}

// Where a (row, split) lies in Forward.parts: row_max, row_sum, acc. Splits of a row are neighbours.
static AI float *part_of(const Forward &f, const Task &t, int64_t i, int64_t head) {
  const Call &c = *f.plan.call;
  const int64_t first_token = c.cu_seqlens_q ? t.sequence.query_start : t.sequence.batch * c.seqlen_q;
  const int64_t index = first_token * c.num_heads_q + head * t.sequence.num_queries + i;
  return f.parts + (index * f.plan.splits + t.split) * (c.head_dim_v + 2);
}
static void start_softmax(const Forward &f, const Task &t, const Panel &panel, Softmax *state) {
  const Call &c = *f.plan.call;
  for (int64_t l = 0; l < NQ; l++) {
    // a sink is a key of score `sink` and value 0
    const float sink = c.sinks && t.split == 0 ? c.sinks[panel.head[l]] / f.scoring.unit : -INFINITY;
    state->row_max[l] = sink;
    state->row_sum[l] = sink > -INFINITY ? 1.f : 0.f;
  }
}
// The sink itself where it is the maximum: dividing by the unit and multiplying again would cost its last place.
static AI float lse_of(const Forward &f, int64_t head, float top, float sum) {
  const Call &c = *f.plan.call;
  if (!(sum > 0)) return -INFINITY;
  const bool is_sink = c.sinks && top == c.sinks[head] / f.scoring.unit;
  return (is_sink ? c.sinks[head] : top * f.scoring.unit) + logf(sum);
}
// Writes lse of a row, or its state where keys are split; false if the state is not finite.
static AI bool finish_row(const Forward &f, const Task &t, int64_t i, int64_t head, float top, float sum) {
  const Call &c = *f.plan.call;
  if (f.parts) {
    float *part = part_of(f, t, i, head);
    part[0] = top, part[1] = sum;
  } else {
    c.lse[lse_index(c, c.lse_strides, 1, t, i, head)] = lse_of(f, head, top, sum);
  }
  return sum - sum == 0.f && top < INFINITY;
}

struct Extent {
  int64_t rows, keys, panels;  // packed rows and keys of the longest sequence; panels in all
};
static Extent extent_of(const Call &c) {
  Extent e = {0, 0, 0};
  const int64_t group = c.num_heads_q / c.num_heads_kv;
  for (int64_t b = 0; b < (c.cu_seqlens_q ? c.batch : min64(1, c.batch)); b++) {
    const Sequence s = sequence_of(c, b);
    e.rows = max64(e.rows, s.num_queries * group), e.keys = max64(e.keys, s.num_keys);
    e.panels += (s.num_queries * group + NQ - 1) / NQ * c.num_heads_kv;
  }
  if (!c.cu_seqlens_q) e.panels *= c.batch;
  return e;
}
// The keys of a task: what its rows see, cut to its split.
static AI Span task_keys(const Call &c, const Plan &plan, const Task &t, int64_t i_lo, int64_t i_hi, int64_t block_n) {
  Span span = key_span(c, t.sequence, i_lo, i_hi);
  if (plan.splits == 1) return span;
  const int64_t part = round_up((t.sequence.num_keys + plan.splits - 1) / plan.splits, block_n);
  return {max64(span.lo, t.split * part), min64(span.hi, (t.split + 1) * part)};
}

template <class T> static AI void take(char **at, int64_t bytes, T **place) {
  *place = (T *)*at;
  *at += round_up(bytes, 64);
}

// Where packed weights of key `key` of a block are; a block of engines without packed tiles is one run.
template <class Engine> static AI const char *weights_at(const char *packed, int64_t key) {
  if constexpr (Engine::SHARES_TILES) return packed + Engine::weights_at(key);
  else return packed;
}

template <class Engine> struct ForwardTask {
  static constexpr int BLOCK_N = Engine::BLOCK_N;
  static constexpr int64_t MOST = MAX_PIECES<BLOCK_N>;
  static constexpr bool SHARES_TILES = Engine::SHARES_TILES;
  const Forward *f;
  const Call *c;
  Task task;
  int64_t num_panels, acc_floats;
  Panel *panels;
  Softmax *states;
  char *lanes;
  float *acc, *tile, *extra;  // extra: bias or dropout factors of a tile
  char *rows, *columns, *weights;
  Run runs[MOST];  // of the block in work
  int64_t num_runs;

  // Lays the scratch memory out from `at` on (null: to be measured); returns its end.
  char *lay_out(char *at) {
    const int64_t p = f->plan.capacity / NQ, d = c->head_dim, dv = c->head_dim_v, tile_bytes = (BLOCK_N + 8) * NQ * 4;
    take(&at, p * (int64_t)sizeof(Panel), &panels);
    take(&at, p * (int64_t)sizeof(Softmax), &states);
    take(&at, p * Engine::lanes_bytes(d), &lanes);
    take(&at, p * Engine::acc_rows(dv) * NQ * 4, &acc);
    take(&at, tile_bytes, &tile);
    take(&at, tile_bytes, &extra);
    take(&at, Engine::rows_bytes(BLOCK_N, d), &rows);
    take(&at, Engine::columns_bytes(BLOCK_N, dv), &columns);
    take(&at, Engine::weights_bytes(BLOCK_N), &weights);
    return at;
  }
  void start() {
    num_panels = (task.row_hi - task.row_lo + NQ - 1) / NQ;
    acc_floats = Engine::acc_rows(c->head_dim_v) * NQ;
    for (int64_t p = 0; p < num_panels; p++) {
      panel_of(*c, task, f->plan.group, task.row_lo + p * NQ, task.row_hi, &panels[p]);
      Engine::pack_lanes(panels[p].query_rows, panels[p].n, c->head_dim, lanes + p * Engine::lanes_bytes(c->head_dim),
                         f->scoring.sign);
      start_softmax(*f, task, panels[p], &states[p]);
    }
    memset(acc, 0, (size_t)(num_panels * acc_floats * 4));
  }
  // One panel's scores of the pieces, which lie in the tile one after the other.
  void score(int64_t p, const Piece *pieces, const Look *looks, int64_t num, float *tile_max) {
    for (const Piece *x = pieces; x < pieces + num; x++) {
      const bool is_partial = !is_full(*c, task.sequence, panels[p].i_lo, panels[p].i_hi, x->k0, x->k0 + x->n);
      const int32_t *shown = looks && looks[x - pieces].is_masked ? looks[x - pieces].shown : 0;
      score_tile(*c, f->scoring, panels[p], task.sequence, tile + x->at * NQ, x->k0, x->n, is_partial, shown, extra, 0,
                 tile_max);
    }
  }
  // Pieces of n keys in all against one panel; `is_masked`: some pair is hidden.
  void fold(int64_t p, const Piece *pieces, const Look *looks, int64_t num, bool is_masked) {
    const Scoring &s = f->scoring;
    const int64_t n = pieces[num - 1].at + pieces[num - 1].n;
    alignas(64) float tile_max[NQ], subtrahend[NQ], alpha[NQ];
    for (int64_t l = 0; l < NQ; l++) tile_max[l] = -INFINITY;
    const Run *end = runs;
    bool is_simple = s.is_plain && !is_masked;
    for (; end < runs + num_runs && end->at < n; end++) is_simple &= min64(end->n, n - end->at) % Engine::MAX_UNIT == 0;
    for (const Run *r = runs; r < end; r++)  // in their order: what one writes beyond its end the next one writes again
      Engine::scores(r->rows, r->capacity, lanes + p * Engine::lanes_bytes(c->head_dim), min64(r->n, n - r->at),
                     c->head_dim, tile + r->at * NQ, is_simple ? tile_max : 0, panels[p].n);
    if (!is_simple) score(p, pieces, looks, num, tile_max);
    const bool rescales = raise_max(&states[p], tile_max, s.factor, subtrahend, alpha);
    const char *packed;
    if (s.has_dropout) {
      exponentials<true>(tile, n, s.factor, subtrahend, states[p].row_sum);
      for (const Piece *x = pieces; x < pieces + num; x++)
        dropout_tile(*c, 1.f, panels[p], task.sequence, x->k0, x->n, extra + x->at * NQ);
      for (int64_t at = 0; at < n * NQ; at += VW) store(tile + at, load(tile + at) * load(extra + at));
      packed = Engine::pack_weights(tile, n, weights);
    } else {
      packed = Engine::pack_exponentials(tile, n, s.factor, subtrahend, states[p].row_sum, weights);
    }
    for (const Run *r = runs; r < end; r++)
      Engine::accumulate(r->columns, r->capacity, weights_at<Engine>(packed, r->at), min64(r->n, n - r->at), c->head_dim_v,
                         acc + p * acc_floats, rescales && r == runs ? alpha : 0, panels[p].n);
  }
  // Packs the keys and values of the pieces, n in all.
  bool pack(const Piece *pieces, int64_t num) {
    if constexpr (SHARES_TILES)
      if (f->shares_tiles) return use_tiles(pieces, num);
    const char *keys_at[BLOCK_N], *values_at[BLOCK_N];
    const int64_t n = pieces[num - 1].at + pieces[num - 1].n;
    for (const Piece *x = pieces; x < pieces + num; x++) {
      key_rows(*c, c->key, c->key_strides, task, x->k0, x->n, keys_at + x->at);
      key_rows(*c, c->value, c->value_strides, task, x->k0, x->n, values_at + x->at);
    }
    runs[0] = {0, 0, 0, n, rows, 0, columns, BLOCK_N}, num_runs = 1;
    Engine::pack_rows(keys_at, n, BLOCK_N, c->head_dim, rows);
    return Engine::pack_columns(values_at, n, BLOCK_N, c->head_dim_v, columns);
  }
  // The same from the tiles of the unit.
  bool use_tiles(const Piece *pieces, int64_t num) {
    const PackedTiles &tiles = f->tiles;
    const int64_t tile_n = c->lists->tile_n, num_keys = task.sequence.num_keys;
    bool is_finite = true;
    num_runs = tiles.runs_of(unit_of(*c, task), pieces, num, runs, [&](int64_t column, char *at) {
      is_finite &= pack_tile(column * tile_n, min64(tile_n, num_keys - column * tile_n), at);
    });
    for (Run *r = runs; r < runs + num_runs; r++) {
      r->rows = r->tile + Engine::rows_at(r->key, c->head_dim), r->capacity = tiles.capacity;
      r->columns = r->tile + tiles.rows_bytes + Engine::columns_at(r->key);
    }
    return is_finite;
  }
  // Keys and values [k0, k0 + n) as a tile.
  bool pack_tile(int64_t k0, int64_t n, char *at) {
    bool is_finite = true;
    for (int64_t lo = 0; lo < n; lo += BLOCK_N) {
      const char *keys_at[BLOCK_N], *values_at[BLOCK_N];
      const int64_t m = min64(BLOCK_N, n - lo);
      key_rows(*c, c->key, c->key_strides, task, k0 + lo, m, keys_at);
      key_rows(*c, c->value, c->value_strides, task, k0 + lo, m, values_at);
      Engine::pack_rows(keys_at, m, BLOCK_N, c->head_dim, at + Engine::rows_at(lo, c->head_dim));
      is_finite &= Engine::pack_columns(values_at, m, f->tiles.capacity, c->head_dim_v,
                                        at + f->tiles.rows_bytes + Engine::columns_at(lo));
    }
    return is_finite;
  }
  // Sizes of the tiles, whether or not there is memory for them yet.
  static void measure_tiles(const Call &c, PackedTiles *tiles) {
    tiles->capacity = PackedTiles::capacity_for(c.lists->tile_n);
    tiles->rows_bytes = round_up(Engine::rows_bytes(c.lists->tile_n, c.head_dim), 64);
    tiles->tile_bytes = tiles->rows_bytes + round_up(Engine::columns_bytes(tiles->capacity, c.head_dim_v), 64);
  }
  bool run() {
    Engine::begin();
    const bool is_finite = run_between();
    Engine::end();
    return is_finite;
  }
  bool run_between() {
    start();
    const bool is_finite = c->lists ? run_listed() : run_span();
    return is_finite & finish();
  }
  bool run_span() {
    const Span span = task_keys(*c, f->plan, task, panels[0].i_lo, panels[num_panels - 1].i_hi, BLOCK_N);
    bool is_finite = true;
    for (int64_t k0 = span.lo - span.lo % BLOCK_N; k0 < span.hi; k0 += BLOCK_N) {
      const int64_t lo = max64(k0, span.lo / KEY_UNIT * KEY_UNIT), n = min64(k0 + BLOCK_N, span.hi) - lo;
      Piece piece = {lo, n, 0, 0, 0, 0, true, true};
      is_finite &= pack(&piece, 1);
      for (int64_t p = 0; p < num_panels; p++) {
        const Span seen = key_span(*c, task.sequence, panels[p].i_lo, panels[p].i_hi);
        piece.n = min64(lo + n, seen.hi) - lo;
        if (piece.n > 0 && seen.lo < lo + piece.n)
          fold(p, &piece, 0, 1, !is_full(*c, task.sequence, panels[p].i_lo, panels[p].i_hi, lo, lo + piece.n));
      }
    }
    return is_finite;
  }
  bool run_listed() {
    Piece pieces[MOST];
    Look looks[MOST];
    Gather gather;
    gather.start(*c, task, f->plan.group, false);
    const int64_t block_n = f->shares_tiles ? whole_tiles(c->lists->tile_n, BLOCK_N) : BLOCK_N;
    bool is_finite = true;
    while (const int64_t num = gather.next_block(block_n, MOST, pieces)) {
      if (pieces[num - 1].at + pieces[num - 1].n == 0) continue;
      is_finite &= pack(pieces, num);
      for (int64_t p = 0; p < num_panels; p++) {
        bool is_masked;
        const int64_t seen = gather.look_at(*c, task.sequence, panels[p], pieces, num, looks, &is_masked);
        if (seen > 0) fold(p, pieces, looks, seen, is_masked);
      }
    }
    return is_finite;
  }
  // out = acc / row_sum and lse, or the state as it is where the keys are split.
  bool finish() {
    bool is_finite = true;
    for (int64_t p = 0; p < num_panels; p++) {
      const float *sums = acc + p * acc_floats;
      alignas(64) float factor[NQ];
      char *out[NQ];
      for (int64_t l = 0; l < NQ; l++) {
        const float sum = states[p].row_sum[l];
        factor[l] = sum > 0 ? f->scoring.keep_factor / sum : 0.f;
        if (l >= panels[p].n) continue;
        const int64_t i = panels[p].i_of(l), head = panels[p].head[l];
        is_finite &= finish_row(*f, task, i, head, states[p].row_max[l], sum);
        out[l] = query_row(*c, c->out, c->out_strides, task, i, head);
        if (!f->parts) continue;
        float *part = part_of(*f, task, i, head) + 2, poison = 0;
        for (int64_t t = 0; t < c->head_dim_v; t++) poison += (part[t] = sums[t * NQ + l]) * 0.f;
        is_finite &= poison == 0.f;
      }
      if (!f->parts)
        WITH_DTYPE(c->dtype, is_finite &= unpack_transposed<E>(sums, NQ, panels[p].n, NQ, c->head_dim_v, out, factor));
    }
    return is_finite;
  }
};

template <class Worker> static void forward_work(void *context, int64_t index, char *scratch) {
  Forward *f = (Forward *)context;
  Worker t;
  t.f = f, t.c = f->plan.call, t.task = f->plan.task(index);
  const Slots &slots = f->tiles.slots;
  if (f->shares_tiles) slots.wait(unit_of(*t.c, t.task));
  if (t.task.row_lo < t.task.row_hi) {
    t.lay_out(scratch);
    if (!t.run()) __atomic_store_n(&f->plan.not_finite, 1, __ATOMIC_RELAXED);
  }
  if (f->shares_tiles && slots.is_last(t.task)) slots.release(unit_of(*t.c, t.task));
}

// The splits of one block of rows become out and lse.
static void merge_work(void *context, int64_t index, char *) {
  Forward *f = (Forward *)context;
  const Call &c = *f->plan.call;
  FiniteCheck check;
  Task t = f->plan.task(index * f->plan.splits);
  t.split = 0;
  for (int64_t row = t.row_lo; row < t.row_hi; row++) {
    const int64_t width = c.head_dim_v + 2, i = row / f->plan.group, head = t.first_head + row % f->plan.group;
    float *parts = part_of(*f, t, i, head), top = -INFINITY, sum = 0;
    for (int64_t s = 0; s < f->plan.splits; s++) top = fmaxf(top, parts[s * width]);
    float *acc = parts + 2;  // of the first split, which becomes the sum
    for (int64_t s = 0; s < f->plan.splits; s++) {
      const float *part = parts + s * width;
      const float scale = part[0] > -INFINITY ? exp2f((part[0] - top) * f->scoring.factor) : 0.f;
      sum += part[1] * scale;
      for (int64_t e = 0; e < c.head_dim_v; e++) acc[e] = (s ? acc[e] : 0.f) + part[2 + e] * scale;
    }
    const float factor = sum > 0 ? f->scoring.keep_factor / sum : 0.f;
    c.lse[lse_index(c, c.lse_strides, 1, t, i, head)] = lse_of(*f, head, top, sum);
    char *out = query_row(c, c.out, c.out_strides, t, i, head);
    WITH_DTYPE(c.dtype, store_row<E>(acc, c.head_dim_v, factor, out, &check));
  }
  if (!check.is_finite()) __atomic_store_n(&f->plan.not_finite, 1, __ATOMIC_RELAXED);
}

// Threads that have a million operations or more each; waking one takes about as long.
static int64_t threads_for(const Call &c, int64_t products_halved) {
  double pairs = (double)c.num_heads_q * c.seqlen_k * (c.cu_seqlens_q ? c.cu_seqlens_q[c.batch] : c.batch * c.seqlen_q);
  if (c.lists) pairs *= kept_fraction(c);
  const double operations = pairs * (double)(c.head_dim + c.head_dim_v) * (double)products_halved;
  return (int64_t)fmin((double)c.num_threads, 1. + operations * 1e-6);
}

// Blocks of rows within rows of tiles, and whether tasks share packed tiles.
template <class Worker> static void plan_listed(Forward *f, const Extent &extent) {
  const Call &c = *f->plan.call;
  const int64_t rows = c.lists->tile_m * f->plan.group, num_tiles = (extent.keys + c.lists->tile_n - 1) / c.lists->tile_n;
  f->plan.splits = 1, f->plan.capacity = round_up(rows, NQ);
  int64_t parts = 1;
  while (rows % (2 * parts * NQ) == 0 && rows / parts > f->plan.block_rows) parts *= 2;
  f->plan.block_rows = rows / parts;
  if constexpr (Worker::SHARES_TILES)
    if (num_tiles > 0 && PackedTiles::pays(f->plan, num_tiles)) {
      f->shares_tiles = f->plan.units_outside = true;
      f->tiles.slots.plan = &f->plan, f->tiles.num_tiles = num_tiles;
      f->tiles.slots.num = Slots::wanted(f->plan, f->plan.blocks_of(extent.rows / (c.num_heads_q / c.num_heads_kv)));
      Worker::measure_tiles(c, &f->tiles);
    }
}
template <class Worker> static int run_forward(Forward *f) {
  const Call &c = *f->plan.call;
  const int64_t num_threads = threads_for(c, 2);
  Worker measure;
  measure.f = f, measure.c = &c;
  bool has_run = pool_run(c.num_threads, num_threads, f->plan.num_tasks, (int64_t)measure.lay_out(0), forward_work<Worker>, f);
  if (f->parts) has_run &= pool_run(c.num_threads, num_threads, f->plan.num_tasks / f->plan.splits, 0, merge_work, f);
  return !has_run ? STATUS_NO_MEMORY : f->plan.not_finite ? STATUS_NOT_FINITE : STATUS_OK;
}
template <class Worker> static int forward(const Call &c, int64_t block_panels) {
  Forward f = {};
  f.plan.pack_heads(c);
  f.scoring = scoring_of(c);
  const Extent extent = extent_of(c);
  // As many panels to a task as leave four tasks per thread, or one where all are alike; how many never changes a bit of
  // the result.
  const int64_t per_thread = extent.panels / max64(1, c.num_threads);
  const bool are_alike = c.left >= NO_LIMIT && c.right >= NO_LIMIT && !c.lists;
  const int64_t wanted = are_alike ? max64(per_thread / 4, min64(per_thread, 4)) : per_thread / 4;
  f.plan.block_rows = NQ * min64(block_panels, max64(1, min64(wanted, (extent.rows + NQ - 1) / NQ)));
  f.plan.splits = max64(1, min64(64 / max64(1, extent.panels), extent.keys / 512));
  f.plan.capacity = f.plan.block_rows;
  if (c.lists) plan_listed<Worker>(&f, extent);
  if (!f.plan.lay_out()) return STATUS_NO_MEMORY;
  if (f.plan.splits > 1) {
    const int64_t tokens = c.cu_seqlens_q ? c.cu_seqlens_q[c.batch] : c.batch * c.seqlen_q;
    f.parts = (float *)malloc((size_t)(tokens * c.num_heads_q * f.plan.splits * (c.head_dim_v + 2)) * 4);
    if (!f.parts) {
      free(f.plan.first);
      return STATUS_NO_MEMORY;
    }
  }
  int status = STATUS_NO_MEMORY;
  if (!f.shares_tiles) {
    status = run_forward<Worker>(&f);
  } else {
    Loan loan;
    const int64_t counters = f.tiles.num_states() + Slots::num_counters(c);
    if ((f.tiles.memory = loan.reserve(f.tiles.bytes() + counters * 4))) {
      f.tiles.states = (int32_t *)(f.tiles.memory + f.tiles.bytes());
      memset(f.tiles.states, 0, (size_t)counters * 4);
      f.tiles.slots.lay_out(f.tiles.states + f.tiles.num_states());
      status = run_forward<Worker>(&f);
    }
  }
  free(f.parts);
  free(f.plan.first);
  return status;
}
