// A stand-alone check of the native CPU kernels: random calls against a plain loop in double precision.
//
//   c++ -std=c++20 -O2 -pthread tests/native/harness.cpp tilestream/backends/cpu/native/src/attention.cpp -o harness
//   ./harness [number of calls] [first call] [no-fork]     (qemu cannot fork a process with threads)
//
// Without Python or torch, so that sanitizers, valgrind and emulators see nothing but the kernels. (Options of an
// instruction set: native/isa.py.) A result may be as far off as the roundings on its way allow: `Value.bound`, to
// first order, from the sums of absolute terms. Results must have the same bits with 1, 2 and 4 threads, beside another
// thread's calls, and in a forked child; the kernels' own threads, or with -DJOIN_OPENMP -lgomp those of GNU OpenMP.
// Exit code 0; 1 if something is wrong; 77 if the system has no such instructions.
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>
#include <thread>
#include "problem.h"

// ---- what is right
static bool is_kept(const Call &c, int64_t b, int64_t h, int64_t i, int64_t j) {  // Philox4x32-10
  uint32_t x[4] = {(uint32_t)(j / 4), (uint32_t)i, (uint32_t)h, (uint32_t)b};
  uint32_t k0 = (uint32_t)c.seed, k1 = (uint32_t)(c.seed >> 32);
  for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    const uint64_t left = UINT64_C(0xD2511F53) * x[0], right = UINT64_C(0xCD9E8D57) * x[2];
    const uint32_t next[4] = {(uint32_t)(right >> 32) ^ x[1] ^ k0, (uint32_t)right,
                              (uint32_t)(left >> 32) ^ x[3] ^ k1, (uint32_t)left};
    memcpy(x, next, 16);
  }
  return x[j % 4] < c.keep_threshold;
}
// Relative errors that the kernels state: of a float32 operation, of 2^x, of a product's operands and of weights. On
// AMX a bfloat16 is itself but weights are rounded to it; a float16 is two terms, and the product of the low ones is
// dropped.
static const double UNIT = 0x1p-24, EXP[] = {7.9e-8, 2.9e-6, 2.9e-6};
static const double OPERAND[] = {0, 0, 0x1p-16}, WEIGHT[] = {0, 0x1p-8, 0x1.8p-15};

struct Pair {  // one visible (query, key)
  int64_t j;
  double score, error, weight, keep, tanh, dp, dp_size;
};
struct Row {  // query i of head h of sequence b; token t of tensor batch tb
  int64_t b, tb, h, i, t, first_key, num_keys, shift;
  std::vector<Pair> pairs;
  double lse, lse_error, largest;
};
static void score_row(const Problem &p, Row *r) {
  const Call &c = p.call;
  const int64_t kv = r->h / (c.num_heads_q / c.num_heads_kv);
  r->largest = c.sinks ? fabs(c.sinks[r->h]) : 0;
  double top = c.sinks ? c.sinks[r->h] : -INFINITY;
  const double *query = p.query.row(r->tb, r->t, r->h), *dout = p.dout.row(r->tb, r->t, r->h);
  for (int64_t j = 0; j < r->num_keys; j++) {
    const int64_t distance = j - (r->i + r->shift);
    if (distance < -c.left || distance > c.right || !p.shows(r->b, r->h, r->i, j)) continue;
    Pair x = {j, 0, 0, 0, 1, 0, 0, 0};
    const double *key = p.key.row(r->tb, r->first_key + j, kv), *value = p.value.row(r->tb, r->first_key + j, kv);
    double size = 0;
    for (int64_t e = 0; e < c.head_dim; e++) {
      const double term = c.scale * query[e] * key[e];
      x.score += term, size += fabs(term);
    }
    for (int64_t e = 0; e < c.head_dim_v; e++) {
      const double term = dout[e] * value[e];
      x.dp += term, x.dp_size += fabs(term);
    }
    if (c.softcap > 0) x.tanh = tanh(x.score / c.softcap), x.score = x.tanh * c.softcap;
    const double bias = c.bias ? p.bias.row(r->b, r->h, r->i)[p.bias.dims[3] == 1 ? 0 : j] : 0;
    const double slope = c.alibi ? c.alibi[r->b * c.alibi_strides[0] + r->h * c.alibi_strides[1]] : 0;
    if (bias == -INFINITY) continue;
    x.score += bias - slope * fabs((double)distance);
    size += fabs(bias) + slope * fabs((double)distance);
    x.error = size * ((double)(c.head_dim + 16) * UNIT + OPERAND[c.dtype]);
    if (c.dropout_p > 0) x.keep = is_kept(c, r->b, r->h, r->i, j) ? 1 / (1 - c.dropout_p) : 0;
    r->largest = fmax(r->largest, size), top = fmax(top, x.score);
    r->pairs.push_back(x);
  }
  double sum = c.sinks ? exp(c.sinks[r->h] - top) : 0;
  for (const Pair &x : r->pairs) sum += exp(x.score - top);
  r->lse = sum > 0 ? top + log(sum) : -INFINITY;
  r->lse_error = (double)(r->num_keys + 16) * UNIT + EXP[c.dtype];
  for (Pair &x : r->pairs) {
    x.weight = exp(x.score - r->lse);
    x.error += EXP[c.dtype] + 4 * UNIT * (r->largest + fabs(r->lse));
    r->lse_error += x.weight * x.error;
  }
  if (sum > 0) r->lse_error += 4 * UNIT * (fabs(r->lse) + r->largest);
}
static void expect_row(Problem *p, Row *r) {
  const Call &c = p->call;
  const int64_t kv = r->h / (c.num_heads_q / c.num_heads_kv);
  const double sums_k = (double)(r->num_keys + 16) * UNIT, weight_error = WEIGHT[c.dtype];
  const double half = ldexp(1, -PRECISION[c.dtype]);
  const double sums_q = (double)(c.seqlen_q * c.num_heads_q / c.num_heads_kv + 16) * UNIT;
  const Tensor &dbias = p->results[DBIAS];
  const int64_t full[4] = {c.batch, c.num_heads_q, c.seqlen_q, c.seqlen_k};
  double terms = 1;  // of an entry of dbias
  for (int k = 0; c.dbias && k < 4; k++)
    if (dbias.dims[k] == 1) terms *= (double)full[k];
  p->row(LSE, r->tb, r->t, r->h)->add(r->lse, r->lse_error);
  const double dlse = c.dlse ? *p->dlse.row(r->tb, r->t, r->h) : 0;
  const double *query = p->query.row(r->tb, r->t, r->h), *dout = p->dout.row(r->tb, r->t, r->h);
  double delta = -dlse, delta_error = fabs(dlse) * UNIT, delta_size = 0;
  Value *const out = p->row(OUT, r->tb, r->t, r->h);
  for (const Pair &x : r->pairs)
    for (int64_t e = 0; e < c.head_dim_v; e++) {
      const double term = x.weight * x.keep * p->value.row(r->tb, r->first_key + x.j, kv)[e];
      out[e].add(term, fabs(term) * (x.error + r->lse_error + weight_error + sums_k));
    }
  for (int64_t e = 0; e < c.head_dim_v; e++) {
    out[e].bound += fabs(out[e].x) * half;
    delta += dout[e] * out[e].x, delta_size += fabs(dout[e] * out[e].x), delta_error += fabs(dout[e]) * out[e].bound;
  }
  delta_error += (double)(c.head_dim_v + 8) * UNIT * delta_size;
  p->row(DELTA, r->tb, r->t, r->h)->add(delta, delta_error);
  Value *const dq = p->row(DQ, r->tb, r->t, r->h);
  for (const Pair &x : r->pairs) {
    const double *key = p->key.row(r->tb, r->first_key + x.j, kv);
    Value *const dk = p->row(DK, r->tb, r->first_key + x.j, kv), *const dv = p->row(DV, r->tb, r->first_key + x.j, kv);
    double ds = x.weight * (x.keep * x.dp - delta);
    const double product_error = (double)(c.head_dim_v + 8) * UNIT + OPERAND[c.dtype];
    double error = x.weight * (x.keep * x.dp_size * product_error + delta_error) +
                   fabs(ds) * (x.error + r->lse_error + 8 * UNIT);
    if (c.dbias) p->row(DBIAS, r->b, r->h, r->i)[dbias.dims[3] == 1 ? 0 : x.j].add(ds, error + fabs(ds) * terms * UNIT);
    if (c.softcap > 0) {
      error = error * (1 - x.tanh * x.tanh) + fabs(ds) * (8 * UNIT + 2 * x.error / c.softcap);
      ds *= 1 - x.tanh * x.tanh;
    }
    for (int64_t e = 0; e < c.head_dim; e++) {
      const double k = c.scale * key[e], q = c.scale * query[e];
      dq[e].add(ds * k, fabs(k) * (error + fabs(ds) * (weight_error + sums_k)));
      dk[e].add(ds * q, fabs(q) * (error + fabs(ds) * (weight_error + sums_q)));
    }
    for (int64_t e = 0; e < c.head_dim_v; e++) {
      const double term = x.weight * x.keep * dout[e];
      dv[e].add(term, fabs(term) * (x.error + r->lse_error + weight_error + sums_q));
    }
  }
}
static void expect(Problem *p) {
  const Call &c = p->call;
  for (int r = 0; r < NUM_RESULTS; r++) {
    const int64_t *n = p->results[r].dims;
    p->expected[r].assign((size_t)(n[0] * n[1] * n[2] * n[3]), {});
  }
  for (int64_t b = 0; b < c.batch; b++) {
    const size_t s = (size_t)b;
    const bool is_packed = p->is_packed();
    const int64_t first_query = is_packed ? p->cu_q[s] : 0, first_key = is_packed ? p->cu_k[s] : 0;
    const int64_t queries = is_packed ? p->cu_q[s + 1] - first_query : c.seqlen_q;
    const int64_t keys = is_packed ? p->cu_k[s + 1] - first_key : c.seqlen_k;
    for (int64_t h = 0; h < c.num_heads_q; h++)
      for (int64_t i = 0; i < queries; i++) {
        const int64_t shift = is_packed ? keys - queries : c.shift;
        Row row = {b, is_packed ? 0 : b, h, i, first_query + i, first_key, keys, shift, {}, 0, 0, 0};
        score_row(*p, &row);
        expect_row(p, &row);
      }
  }
}

// ---- checking
static double worst[3][NUM_RESULTS];  // largest error / bound
static bool is_right(Problem *p, int r) {
  Tensor &x = p->results[r];
  const int64_t type = p->call.dtype, tokens = r == DBIAS ? x.dims[1] : p->covered(r == DK || r == DV);
  const double smallest = x.dtype == DTYPE_F16 ? 0x1p-25 : 1e-35;
  const double half = r == OUT ? 0 : ldexp(1, -PRECISION[x.dtype]);  // of `out` it is in the bound
  bool is_good = true;
  for (int64_t a = 0; a < x.dims[0]; a++)
    for (int64_t b = 0; b < tokens; b++)
      for (int64_t c = 0; c < x.dims[2]; c++)
        for (int64_t d = 0; d < x.dims[3]; d++) {
          const Value &want = p->row(r, a, b, c)[d];
          const double got = x.get(a, b, c, d);
          const double ratio = got == want.x ? 0 : fabs(got - want.x) / (want.bound + half * fabs(want.x) + smallest);
          if (ratio > worst[type][r]) worst[type][r] = ratio;
          if (!(ratio <= 1) && is_good) {
            printf("  %s[%d, %d, %d, %d] is %.9g, not %.9g within %.2g\n", RESULTS[r], (int)a, (int)b, (int)c, (int)d,
                   got, want.x, want.bound);
            is_good = false;
          }
          memset(x.at(a, b, c, d), 0xff, (size_t)BYTES[x.dtype]);
        }
  for (int64_t t = 0; t < x.bytes && is_good; t++)  // all that is left must be as it was
    if (x.memory[(size_t)t] != (char)0xff) {
      printf("  %s: byte %d of %d was written\n", RESULTS[r], (int)t, (int)x.bytes);
      is_good = false;
    }
  return is_good;
}

static int limit(int64_t distance) { return distance == NO_LIMIT ? -1 : (int)distance; }
static void describe(const Problem &p, int64_t index, const char *what) {
  const Call &c = p.call;
  printf("call %d %s: %s, batch %d%s, heads %d/%d, %d x %d, d %d/%d\n", (int)index, what, NAMES[c.dtype], (int)c.batch,
         p.is_packed() ? " packed" : "", (int)c.num_heads_q, (int)c.num_heads_kv, (int)c.seqlen_q, (int)c.seqlen_k,
         (int)c.head_dim, (int)c.head_dim_v);
  printf("  left %d, right %d (-1: none), shift %d, scale %g, softcap %g, dropout %g, alibi %d, sinks %d, dlse %d\n",
         limit(c.left), limit(c.right), (int)c.shift, c.scale, c.softcap, c.dropout_p, c.alibi != nullptr,
         c.sinks != nullptr, c.dlse != nullptr);
  const int64_t *s = c.bias_strides, *d = c.dbias_strides;
  if (c.bias) printf("  bias %d, strides %d %d %d %d\n", (int)c.bias_dtype, (int)s[0], (int)s[1], (int)s[2], (int)s[3]);
  if (const Lists *l = c.lists)
    printf("  tiles %d x %d, plane strides %d %d, %d heads packed\n", (int)l->tile_m, (int)l->tile_n,
           (int)l->plane_strides[0], (int)l->plane_strides[1], (int)l->packed_heads);
  if (c.dbias) printf("  dbias, strides %d %d %d %d\n", (int)d[0], (int)d[1], (int)d[2], (int)d[3]);
}
static bool check_call(int64_t index) {
  Problem p;
  make_problem(&p, index);
  const int status = p.run(1);
  if (status) {
    describe(p, index, "is refused");
    return false;
  }
  p.remember();
  expect(&p);
  bool is_good = true;
  for (int r = 0; r < NUM_RESULTS; r++) is_good &= is_right(&p, r);
  if (!is_good) describe(p, index, "is wrong");
  for (int t = 0; t < (index < NUM_SPECIAL ? 12 : 2); t++)
    if (p.run(t % 2 ? 2 : 4) || !p.is_as_before()) {
      describe(p, index, "depends on the number of threads");
      return false;
    }
  return is_good;
}
// A NaN that some row sees must be found, in every input, with and without other threads.
static bool refuses_nan(int64_t index) {
  bool is_good = true;
  for (int input = 0; input < 4; input++)
    for (int64_t num_threads : {1, 4}) {
      Problem p;
      make_problem(&p, index);
      if (p.run(1)) return false;
      Tensor &x = input == 0 ? p.query : input == 1 ? p.key : input == 2 ? p.value : p.dout;
      x.set(0, x.dims[1] / 2, x.dims[2] - 1, x.dims[3] - 1, NAN);
      p.call.num_threads = num_threads;
      const bool is_found = input == 3 || tilestream_forward(&p.call) == STATUS_NOT_FINITE;
      if (!is_found || tilestream_backward(&p.call) != STATUS_NOT_FINITE) {
        printf("a NaN in input %d of call %d is not found\n", input, (int)index);
        is_good = false;
      }
    }
  return is_good;
}
// Calls that repeat while another thread makes others: each must give the bits that it gave alone.
static bool repeats(int64_t index, int times) {
  Problem p;
  make_problem(&p, index);
  if (p.run(1)) return false;
  p.remember();
  for (int t = 0; t < times; t++)
    if (p.run(4) || !p.is_as_before()) return false;
  return true;
}
static bool serves_two_threads() {
  bool is_good[2] = {};
  std::thread first([&] { is_good[0] = repeats(NUM_SPECIAL + 1, 30); }), second([&] { is_good[1] = repeats(7, 30); });
  first.join(), second.join();
  if (!is_good[0] || !is_good[1]) printf("calls of two threads disturb each other\n");
  return is_good[0] && is_good[1];
}
static bool survives_fork() {  // the pool's threads are gone in the child
  for (int t = 0; t < 10; t++) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);
      _exit(repeats(7, 5) ? 0 : 1);
    }
    int status = 1;
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0) {
      printf("a forked child fails: status %x\n", (unsigned)status);
      return false;
    }
  }
  return repeats(7, 1);
}

#ifdef JOIN_OPENMP
extern "C" void GOMP_parallel(void (*body)(void *), void *data, unsigned num_threads, unsigned flags);
#endif

int main(int count, char **arguments) {
  const int64_t calls = count > 1 ? atoll(arguments[1]) : 300, first = count > 2 ? atoll(arguments[2]) : 0;
  if (!tilestream_usable()) {
    printf("the system does not let this process use the instruction set\n");
    return 77;  // for "skipped"
  }
  if (tilestream_abi() != (int64_t)(sizeof(Call) + sizeof(Lists))) {
    printf("sizeof(Call) or sizeof(Lists) differs\n");
    return 1;
  }
#ifdef JOIN_OPENMP
  tilestream_join((void *)GOMP_parallel);
#endif
  int64_t failed = 0;
  for (int64_t index = first; index < first + calls; index++) failed += !check_call(index);
  for (int64_t index : {1, 2, 9, 10}) failed += !refuses_nan(index);
  failed += !serves_two_threads();
  if (count <= 3) failed += !survives_fork();
  printf("%d calls; largest error / bound\n         ", (int)calls);
  for (const char *name : RESULTS) printf(" %8s", name);
  for (int type = 0; type < 3; type++) {
    printf("\n%-9s", NAMES[type]);
    for (double ratio : worst[type]) printf(" %8.4f", ratio);
  }
  printf("\n%s: %d failures\n", failed ? "FAILED" : "ok", (int)failed);
  fflush(stdout);  // a leak checker ends the process before stdio does
  return failed != 0;
}
