// Computes   dq, dk, dv and, where asked for, dbias and delta, for every (sequence, KV head, block of query rows).
// Algorithm  FlashAttention, algorithm 4 (arXiv:2205.14135), query rows outside as in the forward: P is made again from
//            lse; dv += P^T dout;  dS = P * (dout V^T - delta);  dq += dS K;  dk += dS^T Q.
// Schedule   as the forward, with smaller blocks of rows and keys. Tasks add to dk and dv of a key block one after the
//            other: a ticket per (KV head, key block) says how many have, so the sum has one order, whatever the
//            number of threads, with one accumulator. The tasks of a KV head follow each other like a wave, a few blocks
//            behind; the last one to end stores dk and dv. Only the heads in work have accumulators.
// Traffic    Q, out, dout, dq once; K and V once per task (packed tiles of a block mask, as in the forward); the float32
//            sums of dk and dv read and written once per task.
// On chip    tiles of P and dS for all panels of a task, packed operands: the second-level cache.
// Numerics   as the forward; P is made from lse rounded to float32.
// Limits     as the forward.
// With a block mask a key block is a column of its tiles. A block of keys that is worked on may hold several of those, and
// their sums are added to one after the other.
#pragma once
#include "forward.h"

struct Backward {
  Plan plan;
  Scoring scoring;
  bool orders_units;       // dbias is shared between units or members, which then add in their order
  int64_t num_key_blocks;  // of the longest sequence
  int64_t num_row_blocks;
  int64_t key_block;       // keys
  int64_t num_columns;     // of a block mask's tiles
  Slots slots;             // freed when dk and dv are written
  int64_t slot_keys;       // keys of a slot
  float *dk_sum, *dv_sum;  // accumulators of dk and dv: (slots, slot_keys, padded width)
  int32_t *tickets;        // (units, num_key_blocks): tasks that have added
  int32_t *bias_tickets;  // (units, num_row_blocks), of which the first unit of a sharing group is used
  int32_t *ranks;         // of a block mask's tiles (T,): how many tasks of a unit add to its column before
  PackedTiles tiles;
};

// Tasks of a unit go through the rows of tiles in one order, member by member where each has a plane of its own. With one
// plane for all a rank is that of the first member: between two of its rows are all the others.
static void rank_listed_tiles(Backward *b, int32_t *counts) {
  const Call &c = *b->plan.call;
  const Lists &lists = *c.lists;
  const bool by_head = lists.plane_strides[1] != 0;
  const int64_t members = by_head ? b->plan.members : 1;
  for (int64_t batch = 0; batch < (lists.plane_strides[0] ? c.batch : 1); batch++)
    for (int64_t head = 0; head < (by_head ? c.num_heads_q : 1); head += members) {
      memset(counts, 0, (size_t)b->num_columns * 4);
      for (int64_t k = 0; k < lists.num_rows; k++)
        for (int64_t m = 0; m < members; m++) {
          const int64_t row = first_list(lists, batch, head + m) + b->plan.block_at(k, lists.num_rows, batch, head + m);
          for (int64_t e = lists.offsets[row]; e < lists.offsets[row + 1]; e++) b->ranks[e] = counts[lists.columns[e]]++;
        }
    }
}

template <class Engine> struct BackwardTask {
  const Backward *b;
  const Call *c;
  Task task;
  int64_t num_panels, unit;
  float *dk_sum, *dv_sum;  // of the unit
  Panel *panels;
  char *lanes_q, *lanes_dout, *outer_q, *outer_dout, *rows_k, *rows_v, *columns_k, *weights, *outer_p, *outer_ds;
  float *dq_acc, *p_tiles, *ds_tiles, *extra, *tanh_tile, *lse_lanes, *delta;
  static constexpr int BACKWARD_N = Engine::BACKWARD_N;
  static constexpr int64_t MOST = MAX_PIECES<BACKWARD_N>;
  Run runs[MOST];  // of the block in work
  int64_t num_runs;
  static constexpr int64_t CAPACITY = BACKWARD_N + Engine::OUTER_ROWS, TILE = CAPACITY * NQ;

  char *lay_out(char *at) {
    const int64_t p = b->plan.capacity / NQ, d = c->head_dim, dv = c->head_dim_v;
    take(&at, p * (int64_t)sizeof(Panel), &panels);
    take(&at, p * Engine::lanes_bytes(d), &lanes_q);
    take(&at, p * Engine::lanes_bytes(dv), &lanes_dout);
    take(&at, Engine::outer_bytes(p * NQ, d), &outer_q);
    take(&at, Engine::outer_bytes(p * NQ, dv), &outer_dout);
    take(&at, Engine::rows_bytes(BACKWARD_N, d), &rows_k);
    take(&at, Engine::rows_bytes(BACKWARD_N, dv), &rows_v);
    take(&at, Engine::columns_bytes(BACKWARD_N, d), &columns_k);
    take(&at, Engine::weights_bytes(BACKWARD_N), &weights);
    take(&at, Engine::outer_weights_bytes(CAPACITY, b->plan.capacity), &outer_p);
    take(&at, Engine::outer_weights_bytes(CAPACITY, b->plan.capacity), &outer_ds);
    take(&at, p * Engine::acc_rows(d) * NQ * 4, &dq_acc);
    take(&at, p * TILE * 4, &p_tiles);
    take(&at, p * TILE * 4, &ds_tiles);
    take(&at, TILE * 4, &extra);
    take(&at, TILE * 4, &tanh_tile);
    take(&at, p * NQ * 4, &lse_lanes);
    take(&at, p * NQ * 4, &delta);
    return at;
  }
  int64_t lse_at(const int64_t *strides, int64_t token_stride, const Panel &panel, int64_t lane) const {
    return lse_index(*c, strides, token_stride, task, panel.i_of(lane), panel.head[lane]);
  }
  bool start() {
    const int64_t capacity = b->plan.capacity;
    bool is_finite = true;
    num_panels = (task.row_hi - task.row_lo + NQ - 1) / NQ;
    unit = unit_of(*c, task);
    const int64_t slot = unit % b->slots.num;
    dk_sum = b->dk_sum + slot * b->slot_keys * Engine::sum_width(c->head_dim);
    dv_sum = b->dv_sum + slot * b->slot_keys * Engine::sum_width(c->head_dim_v);
    for (int64_t p = 0; p < num_panels; p++) {
      Panel &panel = panels[p];
      panel_of(*c, task, b->plan.group, task.row_lo + p * NQ, task.row_hi, &panel);
      const char *dout_rows[NQ];
      for (int64_t l = 0; l < NQ; l++) {
        const int64_t i = panel.i_of(l), head = panel.head[l];
        dout_rows[l] = query_row(*c, c->dout, c->dout_strides, task, i, head);
        const float lse = l < panel.n ? c->lse[lse_at(c->lse_strides, 1, panel, l)] : -INFINITY;
        lse_lanes[p * NQ + l] = lse == -INFINITY ? INFINITY : lse;  // no key, no weight
        const char *out = query_row(*c, c->out, c->out_strides, task, i, head);
        float dot = 0;
        if (l < panel.n) WITH_DTYPE(c->dtype, dot = dot_rows<E>(out, dout_rows[l], c->head_dim_v));
        if (l < panel.n && c->dlse) dot -= c->dlse[lse_at(c->dlse_strides, c->dlse_strides[2], panel, l)];
        if (l < panel.n && c->delta) c->delta[lse_at(c->lse_strides, 1, panel, l)] = dot;
        delta[p * NQ + l] = dot;
      }
      is_finite &= Engine::pack_lanes(panel.query_rows, panel.n, c->head_dim,
                                      lanes_q + p * Engine::lanes_bytes(c->head_dim), b->scoring.sign);
      is_finite &= Engine::pack_lanes(dout_rows, panel.n, c->head_dim_v,
                                      lanes_dout + p * Engine::lanes_bytes(c->head_dim_v), 1.f);
      Engine::pack_outer(panel.query_rows, panel.n, p * NQ, capacity, c->head_dim, outer_q);
      Engine::pack_outer(dout_rows, panel.n, p * NQ, capacity, c->head_dim_v, outer_dout);
    }
    memset(dq_acc, 0, (size_t)(num_panels * Engine::acc_rows(c->head_dim) * NQ * 4));
    return is_finite;
  }
  // P and dS of the pieces against one panel, and their share of dq; `padded`: rows that are read later, 0 from n on.
  bool fold(int64_t p, const Piece *pieces, const Look *looks, int64_t num, bool is_masked, int64_t padded) {
    const Scoring &s = b->scoring;
    const Panel &panel = panels[p];
    const int64_t n = pieces[num - 1].at + pieces[num - 1].n;
    float *p_tile = p_tiles + p * TILE, *ds_tile = ds_tiles + p * TILE;
    alignas(64) float unused[NQ] = {};
    const Run *end = runs;
    while (end < runs + num_runs && end->at < n) end++;
    for (const Run *r = runs; r < end; r++)
      Engine::scores(r->rows, r->capacity, lanes_q + p * Engine::lanes_bytes(c->head_dim), min64(r->n, n - r->at),
                     c->head_dim, p_tile + r->at * NQ, 0, panel.n);
    if (!s.is_plain || is_masked)
      for (const Piece *x = pieces; x < pieces + num; x++) {
        const bool is_partial = !is_full(*c, task.sequence, panel.i_lo, panel.i_hi, x->k0, x->k0 + x->n);
        const int32_t *shown = looks && looks[x - pieces].is_masked ? looks[x - pieces].shown : 0;
        score_tile(*c, s, panel, task.sequence, p_tile + x->at * NQ, x->k0, x->n, is_partial, shown, extra,
                   s.has_softcap ? tanh_tile + x->at * NQ : 0, unused);
      }
    for (const Run *r = runs; r < end; r++)
      Engine::scores(r->value_rows, r->capacity, lanes_dout + p * Engine::lanes_bytes(c->head_dim_v),
                     min64(r->n, n - r->at), c->head_dim_v, ds_tile + r->at * NQ, 0, panel.n);
    for (const Piece *x = pieces; s.has_dropout && x < pieces + num; x++)
      dropout_tile(*c, s.keep_factor, panel, task.sequence, x->k0, x->n, extra + x->at * NQ);
    const bool is_finite = gradients<Engine::PRECISE>(p_tile, ds_tile, s.has_dropout ? extra : 0, n,
                                                      s.unit, lse_lanes + p * NQ, delta + p * NQ);
    for (const Piece *x = pieces; c->dbias && x < pieces + num; x++)
      add_bias_gradient(panel, ds_tile + x->at * NQ, x->k0, x->n);
    if (s.has_softcap)
      for (int64_t at = 0; at < n * NQ; at += VW) {
        const vf t = load(tanh_tile + at);
        store(ds_tile + at, load(ds_tile + at) * (splat(1.f) - t * t));
      }
    fill_up(p, n, padded);
    const char *packed = Engine::pack_weights(ds_tile, n, weights);
    for (const Run *r = runs; r < end; r++)
      Engine::accumulate(r->columns, r->capacity, weights_at<Engine>(packed, r->at), min64(r->n, n - r->at), c->head_dim,
                         dq_acc + p * Engine::acc_rows(c->head_dim) * NQ, 0, panel.n);
    return is_finite;
  }
  // Weights of a panel as dk and dv read them: 0 from the n-th on.
  void fill_up(int64_t p, int64_t n, int64_t padded) {
    float *p_tile = p_tiles + p * TILE, *ds_tile = ds_tiles + p * TILE;
    memset(p_tile + n * NQ, 0, (size_t)((padded - n) * NQ * 4));
    memset(ds_tile + n * NQ, 0, (size_t)((padded - n) * NQ * 4));
    Engine::pack_outer_weights(p_tile, padded, p, b->plan.capacity, outer_p, outer_plane());
    Engine::pack_outer_weights(ds_tile, padded, p, b->plan.capacity, outer_ds, outer_plane());
  }
  int64_t outer_plane() const { return CAPACITY * b->plan.capacity * 2; }  // bytes of one term
  void add_bias_gradient(const Panel &panel, const float *tile, int64_t k0, int64_t n) {
    const int64_t *strides = c->dbias_strides;
    for (int64_t l = 0; l < panel.n; l++) {
      float *row = c->dbias + task.sequence.batch * strides[0] + panel.head[l] * strides[1] +
                   (panel.i_lo + panel.i_offset[l]) * strides[2] + k0 * strides[3];
      for (int64_t key = 0; key < n; key++) row[key * strides[3]] += tile[key * NQ + l];
    }
  }
  // Which tasks of this unit add to key block [k0, k1) before this one: those of later rows.
  int32_t rank_in(int64_t k0, int64_t k1) const {
    const Span seen = query_span(*c, task.sequence, k0, min64(k1, task.sequence.num_keys));
    return (int32_t)((seen.hi * b->plan.group - 1) / b->plan.block_rows - task.row_block);
  }
  // Rows [m, end) of the tiles of panels [first, last), whose row 0 is key `lo`.
  void add_outer(int64_t first, int64_t last, int64_t m, int64_t end, int64_t lo) {
    const int64_t dk_width = Engine::sum_width(c->head_dim), dv_width = Engine::sum_width(c->head_dim_v);
    const int64_t rows = min64(last * NQ, task.row_hi - task.row_lo) - first * NQ;
    Engine::outer(p_tiles, TILE, outer_p, outer_plane(), first, last, rows, m, end, outer_dout, b->plan.capacity,
                  c->head_dim_v, dv_sum + lo * dv_width, dv_width);
    Engine::outer(ds_tiles, TILE, outer_ds, outer_plane(), first, last, rows, m, end, outer_q, b->plan.capacity,
                  c->head_dim, dk_sum + lo * dk_width, dk_width);
  }
  void add_to_sums(const int64_t *keys_of, int64_t first, int64_t lo, int64_t n) {
    for (int64_t m = 0, end; m < n; m = end) {  // keys that the same panels see: all from the first that sees key m
      while (first < num_panels && keys_of[first] <= m) first++;
      if (first == num_panels) break;
      end = min64(n, round_up(keys_of[first], Engine::OUTER_ROWS));
      add_outer(first, last_active(keys_of), m, end, lo);
    }
  }
  int64_t last_active(const int64_t *keys_of) const {
    int64_t last = num_panels;
    while (last > 0 && keys_of[last - 1] == 0) last--;
    return last;
  }
  bool run() {
    bool is_finite = start();
    int32_t *bias_ticket = 0;
    b->slots.wait(unit);
    if (b->orders_units) wait_for(bias_ticket = bias_counter(), bias_rank());
    is_finite &= c->lists ? run_listed() : run_span();
    if (bias_ticket) advance(bias_ticket);
    is_finite &= finish();
    if (b->slots.is_last(task)) {
      is_finite &= store_sums();
      b->slots.release(unit);
    }
    return is_finite;
  }
  bool adds_in_turn() const { return c->dbias && c->dbias_strides[2] == 0; }  // rows share entries of dbias
  bool run_span() {
    bool is_finite = true;
    const Span span = key_span(*c, task.sequence, panels[0].i_lo, panels[num_panels - 1].i_hi);
    for (int64_t k0 = span.lo - span.lo % BACKWARD_N; k0 < span.hi; k0 += BACKWARD_N) {
      int32_t *ticket = b->tickets + unit * b->num_key_blocks + k0 / BACKWARD_N;
      const int32_t rank = rank_in(k0, k0 + BACKWARD_N);
      if (adds_in_turn()) wait_for(ticket, rank);
      const int64_t lo = max64(k0, span.lo / KEY_UNIT * KEY_UNIT), n = min64(k0 + BACKWARD_N, span.hi) - lo;
      Piece piece = {lo, n, 0, 0, 0, 0, true, true};
      is_finite &= pack_keys(&piece, 1);
      int64_t keys_of[Engine::BACKWARD_PANELS], first = num_panels;
      for (int64_t p = 0; p < num_panels; p++) {
        const Span seen = key_span(*c, task.sequence, panels[p].i_lo, panels[p].i_hi);
        const int64_t keys = min64(lo + n, seen.hi) - lo;
        keys_of[p] = keys > 0 && seen.lo < lo + keys ? keys : 0;
        if (!keys_of[p]) continue;
        if (first == num_panels) first = p;
        piece.n = keys;
        const bool is_masked = !is_full(*c, task.sequence, panels[p].i_lo, panels[p].i_hi, lo, lo + keys);
        is_finite &= fold(p, &piece, 0, 1, is_masked, round_up(keys, Engine::OUTER_ROWS));
      }
      wait_for(ticket, rank);
      if (rank == 0) clear_sums(k0);
      if (first < num_panels) add_to_sums(keys_of, first, lo, n);
      advance(ticket);
    }
    return is_finite;
  }
  struct Panels {  // that see something of a piece: [first, last)
    int64_t first, last;
  };
  bool run_listed() {
    Piece pieces[MOST];
    Panels active[MOST];
    Gather gather;
    gather.start(*c, task, b->plan.group, true);
    bool is_finite = true;
    const int64_t block_n = b->tiles.num_tiles ? whole_tiles(c->lists->tile_n, BACKWARD_N) : BACKWARD_N;
    while (const int64_t num = gather.next_block(block_n, MOST, pieces)) {
      for (int64_t x = 0; x < num; x++) {
        active[x] = {num_panels, 0};
        if (adds_in_turn()) wait_for(ticket_of(pieces[x]), rank_of(pieces[x]));
      }
      is_finite &= fold_block(gather, pieces, num, active);
      for (int64_t x = 0; x < num; x++) add_piece(pieces[x], active[x]);
    }
    return is_finite;
  }
  bool fold_block(const Gather &gather, const Piece *pieces, int64_t num, Panels *active) {
    Look looks[MOST];
    const int64_t n = pieces[num - 1].at + pieces[num - 1].n, padded = round_up(n, Engine::OUTER_ROWS);
    if (n == 0) return true;
    bool is_finite = pack_keys(pieces, num);
    for (int64_t p = 0; p < num_panels; p++) {
      bool is_masked;
      const int64_t seen = gather.look_at(*c, task.sequence, panels[p], pieces, num, looks, &is_masked);
      if (seen > 0) is_finite &= fold(p, pieces, looks, seen, is_masked, padded);
      else fill_up(p, 0, padded);  // it may lie between two that see something
      for (int64_t x = 0; x < seen; x++)
        if (looks[x].kind != EMPTY) active[x] = {min64(active[x].first, p), p + 1};
    }
    return is_finite;
  }
  int32_t *ticket_of(const Piece &piece) const { return b->tickets + unit * b->num_key_blocks + piece.column; }
  int32_t rank_of(const Piece &piece) const {
    const int64_t rank = b->ranks[piece.entry];
    return (int32_t)(c->lists->plane_strides[1] ? rank : rank * b->plan.members + member());
  }
  int64_t member() const { return task.first_head / b->plan.group % b->plan.members; }
  void add_piece(const Piece &piece, const Panels &active) {
    int32_t *ticket = ticket_of(piece);
    const int32_t rank = rank_of(piece);
    wait_for(ticket, rank);
    if (piece.begins && rank == 0) clear_sums(piece.column * b->key_block);
    // Pieces are in the order of their keys, so a piece's first key is none of the first `at`.
    if (active.first < active.last)
      add_outer(active.first, active.last, piece.at, piece.at + piece.n, piece.k0 - piece.at);
    if (piece.ends) advance(ticket);
  }
  void clear_sums(int64_t k0) {
    const int64_t keys = min64(b->key_block, task.sequence.num_keys - k0);
    const int64_t dk_width = Engine::sum_width(c->head_dim), dv_width = Engine::sum_width(c->head_dim_v);
    memset(dk_sum + k0 * dk_width, 0, (size_t)(keys * dk_width * 4));
    memset(dv_sum + k0 * dv_width, 0, (size_t)(keys * dv_width * 4));
  }
  // dk and dv of the unit; key blocks that no task has reached are 0.
  bool store_sums() {
    const bool is_packed = c->cu_seqlens_k != 0;
    const int64_t size = size_of_dtype(c->dtype);
    FiniteCheck check;
    for (int64_t k0 = 0; k0 < task.sequence.num_keys; k0 += b->key_block) {
      const int64_t k1 = min64(k0 + b->key_block, task.sequence.num_keys);
      if (b->tickets[unit * b->num_key_blocks + k0 / b->key_block] == 0) clear_sums(k0);
      for (int64_t j = k0; j < k1; j++) {
        const int64_t batch = task.sequence.batch, token = task.sequence.key_start + j;
        char *dk = c->dk + size * row_offset(c->dk_strides, batch, token, task.kv_head, is_packed);
        char *dv = c->dv + size * row_offset(c->dv_strides, batch, token, task.kv_head, is_packed);
        const float *dk_row = dk_sum + j * Engine::sum_width(c->head_dim);
        const float *dv_row = dv_sum + j * Engine::sum_width(c->head_dim_v);
        WITH_DTYPE(c->dtype, store_row<E>(dk_row, c->head_dim, (float)c->scale, dk, &check);
                   store_row<E>(dv_row, c->head_dim_v, 1.f, dv, &check));
      }
    }
    return check.is_finite();
  }
  bool pack_keys(const Piece *pieces, int64_t num) {
    if constexpr (Engine::SHARES_TILES)
      if (b->tiles.num_tiles) return use_tiles(pieces, num);
    const char *keys_at[BACKWARD_N], *values_at[BACKWARD_N];
    const int64_t n = pieces[num - 1].at + pieces[num - 1].n;
    for (const Piece *x = pieces; x < pieces + num; x++) {
      key_rows(*c, c->key, c->key_strides, task, x->k0, x->n, keys_at + x->at);
      key_rows(*c, c->value, c->value_strides, task, x->k0, x->n, values_at + x->at);
    }
    runs[0] = {0, 0, 0, n, rows_k, rows_v, columns_k, BACKWARD_N}, num_runs = 1;
    return pack_at(keys_at, values_at, runs[0]);
  }
  bool pack_at(const char *const *keys_at, const char *const *values_at, const Run &to) {
    bool is_finite = Engine::pack_rows(keys_at, to.n, BACKWARD_N, c->head_dim, (char *)to.rows);
    is_finite &= Engine::pack_rows(values_at, to.n, BACKWARD_N, c->head_dim_v, (char *)to.value_rows);
    Engine::pack_columns(keys_at, to.n, to.capacity, c->head_dim, (char *)to.columns);
    return is_finite;
  }
  // The same from the tiles of the unit.
  bool use_tiles(const Piece *pieces, int64_t num) {
    const int64_t tile_n = c->lists->tile_n, num_keys = task.sequence.num_keys;
    bool is_finite = true;
    num_runs = b->tiles.runs_of(unit, pieces, num, runs, [&](int64_t column, char *at) {
      const char *keys_at[BACKWARD_N], *values_at[BACKWARD_N];
      const int64_t k0 = column * tile_n, keys = min64(tile_n, num_keys - k0);
      for (int64_t lo = 0; lo < keys; lo += BACKWARD_N) {
        Run part = {at, lo, 0, min64(BACKWARD_N, keys - lo)};
        place(&part);
        key_rows(*c, c->key, c->key_strides, task, k0 + lo, part.n, keys_at);
        key_rows(*c, c->value, c->value_strides, task, k0 + lo, part.n, values_at);
        is_finite &= pack_at(keys_at, values_at, part);
      }
    });
    for (Run *r = runs; r < runs + num_runs; r++) place(r);
    return is_finite;
  }
  void place(Run *r) const {
    const PackedTiles &tiles = b->tiles;
    r->rows = r->tile + Engine::rows_at(r->key, c->head_dim), r->capacity = tiles.capacity;
    r->value_rows = r->tile + round_up(Engine::rows_bytes(c->lists->tile_n, c->head_dim), 64) +
                    Engine::rows_at(r->key, c->head_dim_v);
    r->columns = r->tile + tiles.rows_bytes + Engine::columns_at(r->key);
  }
  static void measure_tiles(const Call &c, PackedTiles *tiles) {
    tiles->capacity = PackedTiles::capacity_for(c.lists->tile_n);
    tiles->rows_bytes = round_up(Engine::rows_bytes(c.lists->tile_n, c.head_dim), 64) +
                        round_up(Engine::rows_bytes(c.lists->tile_n, c.head_dim_v), 64);
    tiles->tile_bytes = tiles->rows_bytes + round_up(Engine::columns_bytes(tiles->capacity, c.head_dim), 64);
  }
  bool finish() {
    bool is_finite = true;
    alignas(64) float factor[NQ];
    for (int64_t l = 0; l < NQ; l++) factor[l] = (float)c->scale;
    for (int64_t p = 0; p < num_panels; p++) {
      char *rows[NQ];
      for (int64_t l = 0; l < panels[p].n; l++)
        rows[l] = query_row(*c, c->dq, c->dq_strides, task, panels[p].i_of(l), panels[p].head[l]);
      WITH_DTYPE(c->dtype, is_finite &= unpack_transposed<E>(dq_acc + p * Engine::acc_rows(c->head_dim) * NQ, NQ,
                                                             panels[p].n, NQ, c->head_dim, rows, factor));
    }
    return is_finite;
  }
  // Units and members that share dbias add to a block of its rows in their order.
  bool shares_batch() const { return c->dbias_strides[0] == 0; }
  bool shares_heads() const { return c->dbias_strides[1] == 0; }
  int32_t *bias_counter() const {
    const int64_t group = (shares_batch() ? 0 : task.sequence.batch * c->num_heads_kv) + (shares_heads() ? 0 : task.kv_head);
    return b->bias_tickets + group * b->num_row_blocks + task.row_block;
  }
  int32_t bias_rank() const {
    int64_t rank = shares_heads() ? task.kv_head : 0;
    if (shares_batch())
      for (int64_t s = 0; s < task.sequence.batch; s++)
        if (b->plan.blocks_of(sequence_of(*c, s).num_queries) > task.row_block) rank += shares_heads() ? c->num_heads_kv : 1;
    return (int32_t)(rank * b->plan.members + member());
  }
};

template <class Engine> static void backward_work(void *context, int64_t index, char *scratch) {
  Backward *b = (Backward *)context;
  BackwardTask<Engine> t;
  t.b = b, t.c = b->plan.call, t.task = b->plan.task(index);
  t.lay_out(scratch);
  Engine::begin();
  const bool is_finite = t.run();
  Engine::end();
  if (!is_finite) __atomic_store_n(&b->plan.not_finite, 1, __ATOMIC_RELAXED);
}

template <class Engine> static int backward_with(Backward *b, Loan *loan) {
  const Call &c = *b->plan.call;
  const int64_t units = num_units(c);
  const int64_t dk_floats = b->slots.num * b->slot_keys * Engine::sum_width(c.head_dim);
  const int64_t dv_floats = b->slots.num * b->slot_keys * Engine::sum_width(c.head_dim_v);
  const int64_t states = b->tiles.num_states();
  const int64_t counters = units * (b->num_key_blocks + b->num_row_blocks) + Slots::num_counters(c) + states;
  const int64_t num_ranks = c.lists ? num_listed(c) : 0;
  const int64_t tile_bytes = b->tiles.bytes();
  char *memory = loan->reserve(tile_bytes + (dk_floats + dv_floats + counters + num_ranks + b->num_columns) * 4);
  if (!memory) return STATUS_NO_MEMORY;
  b->tiles.memory = memory;
  b->dk_sum = (float *)(memory + tile_bytes), b->dv_sum = b->dk_sum + dk_floats;
  b->tickets = (int32_t *)(b->dv_sum + dv_floats);
  b->bias_tickets = b->tickets + units * b->num_key_blocks;
  b->tiles.states = b->bias_tickets + units * b->num_row_blocks;
  b->slots.lay_out(b->tiles.states + states);
  memset(b->tickets, 0, (size_t)counters * 4);
  b->ranks = b->tickets + counters;
  if (c.lists) rank_listed_tiles(b, b->ranks + num_ranks);
  BackwardTask<Engine> measure;
  measure.b = b, measure.c = &c;
  const int64_t scratch_bytes = (int64_t)measure.lay_out(0);
  const bool shares_rows = c.dbias && c.dbias_strides[1] == 0 && b->plan.capacity < b->plan.group;  // queries are cut after all
  const int64_t num_threads = shares_rows ? 1 : threads_for(c, 5);
  if (!pool_run(c.num_threads, num_threads, b->plan.num_tasks, scratch_bytes, backward_work<Engine>, b)) return STATUS_NO_MEMORY;
  return b->plan.not_finite ? STATUS_NOT_FINITE : STATUS_OK;
}

template <class Engine> static int backward(const Call &c) {
  Backward b = {};
  b.plan.pack_heads(c);
  b.plan.splits = 1;
  b.plan.units_outside = b.plan.in_one_order = true;
  b.scoring = scoring_of(c);
  const bool shares_units = (c.dbias_strides[0] == 0 && c.batch > 1) ||
                            (c.dbias_strides[1] == 0 && c.num_heads_kv * b.plan.members > 1);
  b.orders_units = c.dbias && c.dbias_strides[2] != 0 && c.dbias_strides[3] != 0 && shares_units;
  const Extent extent = extent_of(c);
  // Fixed by the shape alone, because it fixes the order of sums. Whole queries: tasks that share one would add to the same
  // entries of a bias that all heads share.
  const int64_t num_panels = max64(1, min64(Engine::BACKWARD_PANELS, extent.panels / 16));
  b.plan.capacity = NQ * num_panels;
  b.plan.block_rows = b.plan.capacity < b.plan.group ? b.plan.capacity : b.plan.capacity / b.plan.group * b.plan.group;
  b.key_block = Engine::BACKWARD_N;
  if (c.lists) {
    b.plan.block_rows = c.lists->tile_m * b.plan.group, b.plan.capacity = round_up(b.plan.block_rows, NQ);
    b.key_block = c.lists->tile_n;
    for (int64_t e = 0; e < num_listed(c); e++) b.num_columns = max64(b.num_columns, c.lists->columns[e] + 1);
  }
  b.num_key_blocks = (extent.keys + b.key_block - 1) / b.key_block;
  b.num_row_blocks = b.plan.blocks_of(extent.rows / (c.num_heads_q / c.num_heads_kv));
  b.slots.plan = &b.plan, b.slots.num = Slots::wanted(b.plan, b.num_row_blocks), b.slot_keys = extent.keys;
  b.tiles.slots = b.slots;
  if constexpr (Engine::SHARES_TILES)
    if (c.lists && b.num_key_blocks > 0 && PackedTiles::pays(b.plan, b.num_key_blocks)) {
      b.tiles.num_tiles = b.num_key_blocks;
      BackwardTask<Engine>::measure_tiles(c, &b.tiles);
    }
  if (!b.plan.lay_out()) return STATUS_NO_MEMORY;
  Loan loan;
  const int status = backward_with<Engine>(&b, &loan);
  free(b.plan.first);
  return status;
}
