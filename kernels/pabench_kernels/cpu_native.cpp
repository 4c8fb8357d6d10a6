// Paged attention on a CPU, decode and prefill in one call. native_build.py compiles this, cpu_native.py calls it.
//
// Shape legend: T packed query tokens, S sequences, Hq query heads, Hkv KV heads, G = Hq / Hkv, D head_dim, Dv value
// head_dim, BS tokens per block.
//
// One work item is a run of query tokens of one sequence × a run of KV heads. It walks the keys that any of its rows
// may see in tiles, all its heads inside a tile, so that a block is read from end to end; each K and V element is read once
// for the rows of a group together. Rows (query token, head of the group) keep an online softmax in fp32: maximum, sum,
// weighted values.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu_vectors.h"

// Mirrored field by field by `_Args` of cpu_native.py. Strides count elements.
struct Args {
  const void *query, *key_cache, *value_cache;              // [T, Hq, D], [blocks, BS, Hkv, D], [blocks, BS, Hkv, Dv]
  const int32_t *block_table, *seq_lens, *query_start_loc;       // [S, columns], [S], [S + 1]
  const float *k_scale, *v_scale;                                // [Hkv], [blocks, BS, Hkv] or null
  const float *alibi_slopes, *sinks;                             // [Hq] or null
  float *out, *lse;                                              // [T, Hq, Dv]; [T, Hq] or null
  int64_t query_format, key_format, value_format;
  int64_t num_tokens, num_seqs, num_q_heads, num_kv_heads, head_dim, head_dim_v;
  int64_t num_blocks, block_size, columns;
  int64_t query_strides[2], key_strides[3], value_strides[3], table_stride;
  int64_t token_scales[2];  // whether k_scale, v_scale are [blocks, BS, Hkv], contiguous
  int64_t causal, window;  // window: -1 = none
  int64_t threads;
  float scale, soft_cap;                // soft_cap: 0 = none
  int64_t bad_seq, bad_column, bad_id;  // what an error code speaks of
};

namespace {

constexpr int64_t TILE = 16;                   // keys per softmax step; a multiple of 8
constexpr int64_t TILE_BYTES = 128 * 1024;      // of K and V of an item's heads: this tile and the next stay in L2
constexpr int64_t PREFILL_ROWS = 48;           // rows that share one pass over K and V
constexpr int64_t WORTH_A_THREAD = 2'000'000;  // multiply-adds: about 0.1 ms

// ---- the two products: R rows at a time, as many as registers hold ----

// to[r][0…3] = q[r] · k[0…3]
template <int R>
void score(const float* q, const float* const* k, int64_t dim, float* to) {
  const float *k0 = k[0], *k1 = k[1], *k2 = k[2], *k3 = k[3];
  V8 sum[R][4];
  UNROLL for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = sum[r][2] = sum[r][3] = splat(0.0f);
  for (int64_t d = 0; d < dim; d += 8) {
    const V8 y0 = load(k0 + d), y1 = load(k1 + d), y2 = load(k2 + d), y3 = load(k3 + d);
    UNROLL for (int r = 0; r < R; ++r) {
      const V8 x = load(q + r * dim + d);
      sum[r][0] += x * y0;
      sum[r][1] += x * y1;
      sum[r][2] += x * y2;
      sum[r][3] += x * y3;
    }
  }
  for (int r = 0; r < R; ++r) store_sums(to + r * TILE, sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
}

// acc[r] = acc[r] × decay[r] + Σₜ p[r][t] · v[t], on 8·C channels
template <int R, int C>
void weigh(const float* p, const float* const* v, int64_t begin, int64_t end, const float* decay, float* acc,
           int64_t dim) {
  V8 sum[R][C];
  UNROLL for (int r = 0; r < R; ++r) UNROLL for (int c = 0; c < C; ++c) sum[r][c] = splat(0.0f);
  for (int64_t t = begin; t < end; ++t) {
    V8 x[C];
    UNROLL for (int c = 0; c < C; ++c) x[c] = load(v[t] + 8 * c);
    UNROLL for (int r = 0; r < R; ++r) {
      const V8 weight = splat(p[r * TILE + t]);
      UNROLL for (int c = 0; c < C; ++c) sum[r][c] += weight * x[c];
    }
  }
  UNROLL for (int r = 0; r < R; ++r)
    UNROLL for (int c = 0; c < C; ++c)
      store(acc + r * dim + 8 * c, load(acc + r * dim + 8 * c) * decay[r] + sum[r][c]);
}

template <int R>
void weigh_rows(const float* p, const float* const* v, int64_t begin, int64_t end, const float* decay, float* acc,
                int64_t dim) {
  const float* shifted[TILE];
  std::copy(v, v + end, shifted);
  auto step = [&](auto run, int64_t channels, int64_t d) {
    run(p, shifted, begin, end, decay, acc + d, dim);
    for (int64_t t = begin; t < end; ++t) shifted[t] += channels;
  };
  int64_t d = 0;
  for (; d + 32 <= dim; d += 32) step(weigh<R, 4>, 32, d);
  for (; d < dim; d += 8) step(weigh<R, 1>, 8, d);
}

int64_t take(int64_t rows) { return rows == 4 ? 2 : std::min<int64_t>(rows, 3); }

// ---- one work item ----

struct Item {
  int64_t seq, first, last;       // query tokens first…last−1, counted within the sequence
  int64_t head_begin, head_end;   // KV heads
};

struct Tile {
  int64_t start = 0, n = 0;                       // positions start…start+n−1
  const char *key[TILE] = {}, *value[TILE] = {};  // rows of KV head 0
  int64_t slot[TILE] = {};                        // block × BS + offset
};

// Asks for the rows of the next tile while this one is computed, in the order in which they lie in memory.
class Ahead {
 public:
  Ahead(const char* const* rows, int64_t n, int64_t first, int64_t heads, int64_t stride, int64_t bytes)
      : rows(rows), n(n), offset(first * stride), heads(heads), stride(stride), bytes(bytes) {
    if (stride == bytes) this->heads = 1, this->bytes = heads * bytes;  // heads side by side count as one
  }
  int64_t lines() const { return heads * n * ((bytes + 63) / 64); }
  void ask(int64_t lines) {
    for (; lines > 0 && head < heads && n > 0; --lines) {
      __builtin_prefetch(rows[token] + offset + head * stride + at, 0, 2);
      if ((at += 64) < bytes) continue;
      at = 0;
      if (++token == n) token = 0, ++head;
    }
  }

 private:
  const char* const* rows;
  int64_t n, offset, heads, stride, bytes;
  int64_t token = 0, head = 0, at = 0;
};

struct Row {
  float top, sum;       // online softmax
  int64_t low, high;    // positions low…high−1 are visible
  int64_t position;
};

struct Rule {  // how one head's products become logits
  float factor, soft_cap, slope;
};

// Logits of one row to unnormalised weights; gives by how much earlier sums shrink.
float soften(float* x, const Tile& tile, Row& row, const Rule& rule) {
  const int32_t begin = int32_t(std::clamp<int64_t>(row.low - tile.start, 0, tile.n));
  const int32_t end = int32_t(std::clamp<int64_t>(row.high - tile.start, 0, tile.n));
  const float distance = float(tile.start - row.position);
  V8 top = splat(row.top);
  for (int32_t t = 0; t < tile.n; t += 8) {
    const I8 lane = IOTA + t;
    V8 logit = load(x + t) * rule.factor;
    if (rule.soft_cap != 0) logit = tanh8(logit / rule.soft_cap) * rule.soft_cap;
    if (rule.slope != 0) logit += rule.slope * (number(lane) + distance);
    logit = (lane >= begin) & (lane < end) ? logit : splat(-INF);
    store(x + t, logit);
    top = logit > top ? logit : top;  // NaN is no maximum; the exponential below keeps it
  }
  const float before = row.top;
  for (int i = 0; i < 8; ++i) row.top = std::max(row.top, top[i]);
  const float base = row.top == -INF ? 0.0f : row.top;
  V8 sum = {};
  for (int64_t t = 0; t < tile.n; t += 8) {
    const V8 weight = exp8(load(x + t) - base);
    store(x + t, weight);
    sum += weight;
  }
  const float decay = exp8(splat(before - base))[0];
  row.sum = row.sum * decay + ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
  return decay;
}

class Worker {
 public:
  explicit Worker(const Args& args) : a(args), dim(padded(args.head_dim)), dim_v(padded(args.head_dim_v)) {}

  void run(const Item& item) {
    begin(item);
    const int64_t low = rows.front().low, high = rows[num_rows - 1].high;  // both grow with the query's position
    Tile now, next;
    locate(now, item.seq, low, high);
    while (now.n > 0) {
      locate(next, item.seq, now.start + now.n, high);
      const int64_t first = item.head_begin, heads = item.head_end - first;
      const int64_t key_size = size_of(a.key_format), value_size = size_of(a.value_format);
      Ahead keys(next.key, next.n, first, heads, a.key_strides[2] * key_size, a.head_dim * key_size);
      Ahead values(next.value, next.n, first, heads, a.value_strides[2] * value_size, a.head_dim_v * value_size);
      const int64_t steps = heads * ((now.n + 3) / 4);
      const int64_t lines = (std::max(keys.lines(), values.lines()) + steps - 1) / steps;
      for (int64_t i = 0; i < heads; ++i) attend(now, first + i, i * num_rows, keys, values, lines);
      std::swap(now, next);
    }
    finish(item);
  }

 private:
  const Args& a;
  const int64_t dim, dim_v;
  int64_t num_rows = 0, group = 0;
  std::vector<Row> rows;  // [heads of the item, num_rows]; a row is query token × G + head of the group
  std::vector<float> query, acc, logits, decay, wide_key, wide_value;

  void begin(const Item& item) {
    group = a.num_q_heads / a.num_kv_heads;
    num_rows = (item.last - item.first) * group;
    const int64_t heads = item.head_end - item.head_begin;
    rows.resize(heads * num_rows);
    query.assign(heads * num_rows * dim, 0.0f);
    acc.assign(heads * num_rows * dim_v, 0.0f);
    logits.resize(num_rows * TILE);
    decay.resize(num_rows);
    wide_key.resize(TILE * dim);  // what pads a row stays 0
    wide_value.resize(TILE * dim_v);
    const int64_t length = a.seq_lens[item.seq], start = a.query_start_loc[item.seq];
    const int64_t past = length - (a.query_start_loc[item.seq + 1] - start);
    for (int64_t i = 0; i < heads * num_rows; ++i) {
      const int64_t token = item.first + i % num_rows / group;
      const int64_t head = (item.head_begin + i / num_rows) * group + i % group;
      const int64_t position = past + token;
      const int64_t low = a.window < 0 ? 0 : std::max<int64_t>(0, position - a.window + 1);
      const int64_t high = a.causal ? std::max<int64_t>(0, position + 1) : length;
      const float sink = a.sinks ? a.sinks[head] : -INF;
      rows[i] = Row{sink, sink == -INF ? 0.0f : 1.0f, low, high, position};
      const int64_t offset = (start + token) * a.query_strides[0] + head * a.query_strides[1];
      const char* from = static_cast<const char*>(a.query) + offset * size_of(a.query_format);
      widen(a.query_format, from, &query[i * dim], a.head_dim);
    }
  }

  // The next keys from `start` on, to the next multiple of TILE, so that chunks of a prompt cut tiles alike.
  void locate(Tile& tile, int64_t seq, int64_t start, int64_t high) const {
    tile.start = start;
    tile.n = std::max<int64_t>(0, std::min(high, (start / TILE + 1) * TILE) - start);
    const int32_t* table = a.block_table + seq * a.table_stride;
    const int64_t key_size = size_of(a.key_format), value_size = size_of(a.value_format);
    int64_t column = start / a.block_size, slot = start % a.block_size;
    for (int64_t t = 0; t < tile.n; ++t) {
      const int64_t block = table[column];
      tile.slot[t] = block * a.block_size + slot;
      tile.key[t] = static_cast<const char*>(a.key_cache) +
                    (block * a.key_strides[0] + slot * a.key_strides[1]) * key_size;
      tile.value[t] = static_cast<const char*>(a.value_cache) +
                      (block * a.value_strides[0] + slot * a.value_strides[1]) * value_size;
      if (++slot == a.block_size) slot = 0, ++column;
    }
  }

  // One head's rows as fp32: where they lie, or widened into `room` and multiplied by their own scales.
  void fetch(const char* const* at, int64_t n, int64_t offset, int64_t format, int64_t size, float* room,
             const float** found, const float* scales, const int64_t* slots) const {
    const bool in_place = format == FP32 && size % 8 == 0 && !scales;
    for (int64_t t = 0; t < n; ++t) {
      const char* row = at[t] + offset * size_of(format);
      if (!in_place) widen(format, row, room + t * padded(size), size);
      if (scales)
        for (int64_t d = 0; d < size; ++d) room[t * padded(size) + d] *= scales[slots[t] * a.num_kv_heads];
      found[t] = in_place ? reinterpret_cast<const float*>(row) : room + t * padded(size);
    }
    for (int64_t t = n; t % 4; ++t) found[t] = found[n - 1];  // scores come in fours
  }

  void attend(const Tile& tile, int64_t head, int64_t first_row, Ahead& keys_ahead, Ahead& values_ahead,
              int64_t lines) {
    const float *key[TILE], *value[TILE];
    fetch(tile.key, tile.n, head * a.key_strides[2], a.key_format, a.head_dim, wide_key.data(), key,
          a.token_scales[0] ? a.k_scale + head : nullptr, tile.slot);
    fetch(tile.value, tile.n, head * a.value_strides[2], a.value_format, a.head_dim_v, wide_value.data(), value,
          a.token_scales[1] ? a.v_scale + head : nullptr, tile.slot);
    for (int64_t t = 0; t < tile.n; t += 4) {
      for (int64_t i = 0; i < lines; i += 4) keys_ahead.ask(4), values_ahead.ask(4);
      for (int64_t r = 0, n; r < num_rows; r += n) {
        n = take(num_rows - r);
        const auto run = n == 1 ? score<1> : n == 2 ? score<2> : score<3>;
        run(&query[(first_row + r) * dim], key + t, dim, &logits[r * TILE + t]);
      }
    }
    const float factor = a.scale * (a.k_scale && !a.token_scales[0] ? a.k_scale[head] : 1.0f);
    for (int64_t r = 0; r < num_rows; ++r) {
      const float slope = a.alibi_slopes ? a.alibi_slopes[head * group + r % group] : 0.0f;
      decay[r] = soften(&logits[r * TILE], tile, rows[first_row + r], Rule{factor, a.soft_cap, slope});
    }
    for (int64_t r = 0, n; r < num_rows; r += n) {
      n = take(num_rows - r);
      const int64_t low = std::max<int64_t>(0, rows[first_row + r].low - tile.start);
      const int64_t high = std::min(tile.n, rows[first_row + r + n - 1].high - tile.start);
      const auto run = n == 1 ? weigh_rows<1> : n == 2 ? weigh_rows<2> : weigh_rows<3>;
      if (low < high) run(&logits[r * TILE], value, low, high, &decay[r], &acc[(first_row + r) * dim_v], dim_v);
    }
  }

  void finish(const Item& item) const {
    const int64_t start = a.query_start_loc[item.seq];
    for (size_t i = 0; i < rows.size(); ++i) {
      const int64_t token = start + item.first + int64_t(i) % num_rows / group;
      const int64_t kv_head = item.head_begin + int64_t(i) / num_rows;
      const int64_t to = token * a.num_q_heads + kv_head * group + int64_t(i) % group;
      const float factor = a.v_scale && !a.token_scales[1] ? a.v_scale[kv_head] : 1.0f;
      const Row& row = rows[i];
      for (int64_t d = 0; d < a.head_dim_v; ++d)
        a.out[to * a.head_dim_v + d] = row.sum == 0 ? 0.0f : acc[i * dim_v + d] / row.sum * factor;
      if (a.lse) a.lse[to] = row.sum == 0 ? -INF : row.top + std::log(row.sum);
    }
  }
};

// ---- the whole batch ----

enum Error { OK, BAD_QUERY_RANGE, BAD_BLOCK, NO_MEMORY };

// Whether everything that will be read lies inside the tensors; fills the bad_… fields.
Error check(Args& a) {
  for (int64_t seq = 0; seq < a.num_seqs; ++seq) {
    const int64_t start = a.query_start_loc[seq], stop = a.query_start_loc[seq + 1], length = a.seq_lens[seq];
    a.bad_seq = seq;
    if (start < 0 || stop < start || stop > a.num_tokens) return BAD_QUERY_RANGE;
    if (length <= 0 || start == stop) continue;
    const int64_t low = a.window < 0 ? 0 : std::max<int64_t>(0, length - (stop - start) - a.window + 1);
    for (int64_t column = low / a.block_size; column * a.block_size < length; ++column) {
      a.bad_column = column;
      a.bad_id = column < a.columns ? a.block_table[seq * a.table_stride + column] : -1;
      if (a.bad_id < 0 || a.bad_id >= a.num_blocks) return BAD_BLOCK;
    }
  }
  return OK;
}

std::vector<Item> plan(const Args& a, int64_t& work) {
  std::vector<Item> items;
  const int64_t group = a.num_q_heads / a.num_kv_heads;
  const int64_t wanted = a.threads > 1 ? 2 * a.threads : 1;
  const int64_t split = std::min(a.num_kv_heads, (wanted + a.num_seqs - 1) / std::max<int64_t>(1, a.num_seqs));
  const int64_t head_bytes = TILE * (a.head_dim * size_of(a.key_format) + a.head_dim_v * size_of(a.value_format));
  const int64_t fitting = std::max<int64_t>(1, TILE_BYTES / head_bytes);
  for (int64_t seq = 0; seq < a.num_seqs; ++seq) {
    const int64_t queries = a.query_start_loc[seq + 1] - a.query_start_loc[seq];
    if (a.seq_lens[seq] <= 0) continue;
    const int64_t tokens = queries > 1 ? std::max<int64_t>(1, PREFILL_ROWS / group) : 1;
    const int64_t heads = queries > 1 ? 1 : std::min(fitting, (a.num_kv_heads + split - 1) / split);
    for (int64_t head = 0; head < a.num_kv_heads; head += heads)
      for (int64_t first = 0; first < queries; first += tokens)
        items.push_back({seq, first, std::min(first + tokens, queries), head, std::min(head + heads, a.num_kv_heads)});
    work += queries * a.seq_lens[seq] * a.num_q_heads * (a.head_dim + a.head_dim_v);
  }
  return items;
}

void run_all(const Args& a) {
  int64_t work = 0;
  const std::vector<Item> items = plan(a, work);
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  auto loop = [&] {
    try {
      Worker worker(a);
      for (size_t i; (i = next++) < items.size() && !failed;) worker.run(items[i]);
    } catch (const std::bad_alloc&) {
      failed = true;
    }
  };
  // Threads live for one call only: nothing is left over that a fork would break.
  const int64_t threads = std::min({a.threads, int64_t(items.size()), 1 + work / WORTH_A_THREAD});
  std::vector<std::thread> others;
  others.reserve(std::max<int64_t>(threads, 1));
  try {
    for (int64_t i = 1; i < threads; ++i) others.emplace_back(loop);
  } catch (const std::system_error&) {  // no more threads to be had: those that run do the work
  }
  loop();
  for (std::thread& other : others) other.join();
  if (failed) throw std::bad_alloc();
}

}  // namespace

// Rows of sequences without keys keep what `out` and `lse` hold. Gives an Error.
extern "C" int pabench_paged_attention(Args* args) {
  try {
    const Error error = check(*args);
    if (error == OK) run_all(*args);
    return error;
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}
