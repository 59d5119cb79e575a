// The AMX path of paged attention, and the problem that both paths solve.
//
// Scores are computed transposed (keys x queries): K tiles are then read straight from the cache
// and the softmax runs with one query per vector lane, without a horizontal sum.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <vector>

#include "tiles.h"

namespace tandem {

// The operator; see `tandem.model.kernels.paged_attention`.
at::Tensor paged_attention(const at::Tensor& q, const at::Tensor& k_cache,
                           const at::Tensor& v_cache, const at::Tensor& block_table,
                           const at::Tensor& query_start, const at::Tensor& context_len,
                           double scale, int64_t window, double softcap);

// Raises unless the caches are alike and `slots` names one place in them for each token.
void check_slots(const at::Tensor& k_cache, const at::Tensor& v_cache, const at::Tensor& slots,
                 int64_t tokens);

constexpr int TILE_ROWS = 16;        // query rows of one tile
constexpr int MAX_TILES = 4;         // tiles of one work item
constexpr int KEY_BLOCK = 128;       // keys between two rescalings of the softmax
constexpr int KEY_TILE = 16;         // keys that lie together in a block of the cache
constexpr float NEVER = -1e30f;      // running maximum before the first key
constexpr float LOG2_E = 1.4426950408889634f;

// For functions that only fetch: GCC sees no effect in calls of them, and drops those.
#define FETCHES [[gnu::always_inline]] inline

struct Item {
  int32_t span, kv_head, row0, rows, key_begin, key_end;
  int32_t partition, partitions, slot;  // slot: first of the partitions in the scratch, or -1

  bool same_keys(const Item& other) const {
    return span == other.span && kv_head == other.kv_head;
  }
};

template <typename T>
struct Problem {
  const T *q, *k, *v;
  T* out;
  const int32_t *table, *query_start, *context_len;
  int64_t q_token, q_head, token_stride, block_stride;  // of q; of both caches
  int64_t table_width, heads, kv_heads, group, dim, block_size;
  float scale, softcap;
  int32_t window;

  // Calls f(r, token, head) for the rows of an item, in order; without a division for each.
  template <typename F>
  void each_row(const Item& it, const F& f) const {
    int64_t token = query_start[it.span] + it.row0 / group, head = it.row0 % group;
    for (int64_t r = 0; r < it.rows; ++r) {
      f(r, token, it.kv_head * group + head);
      if (++head == group) {
        head = 0;
        ++token;
      }
    }
  }
  // Last position that a token may see: its own.
  int64_t position(const Item& it, int64_t token) const {
    return context_len[it.span] - query_start[it.span + 1] + token;
  }
  int64_t offset(const Item& it, int64_t key) const {
    const int64_t block = table[it.span * table_width + key / block_size];
    return block * block_stride + (key % block_size) * token_stride + it.kv_head * dim;
  }
};

// The unnormalised result of one item: rows x dim, and per row the maximum and the sum (base 2).
struct Partial {
  float *sums, *maximum, *total;
};

#ifdef TANDEM_AMX

// Scratch of one thread, in 64-byte lines; `queries` and `values` are in the pair-interleaved
// order in which AMX wants its right operand.
struct Workspace {
  explicit Workspace(int64_t dim)
      : lines(MAX_TILES * dim / 2 + KEY_BLOCK / 2 * dim / 16 + MAX_TILES * KEY_BLOCK + KEY_BLOCK) {
    queries = lines.data();
    values = queries + MAX_TILES * dim / 2;
    scores = reinterpret_cast<float*>(values + KEY_BLOCK / 2 * dim / 16);
    weights = values + KEY_BLOCK / 2 * dim / 16 + MAX_TILES * KEY_BLOCK;
  }
  std::vector<__m512i> lines;
  alignas(64) int32_t position[MAX_TILES * TILE_ROWS];  // last key that each row may see
  int64_t places[KEY_BLOCK / KEY_TILE];                 // of every 16 keys of a key block
  __m512i* queries;  // [tile][pair of dims][query]
  __m512i* values;   // [pair of keys][dim]
  float* scores;     // [tile][key][query]
  __m512i* weights;  // [32 keys][query][pair of keys], of two tiles in turn

  __m512i* weights_of(int tile) const { return weights + tile % 2 * KEY_BLOCK / 2; }
};

using Bf16Problem = Problem<at::BFloat16>;

// Packs the queries of an item and notes their positions; rows past the end see what the last does.
inline void load_queries(const Bf16Problem& p, const Item& it, Workspace& w) {
  const int64_t lines = p.dim / 2, padded = (it.rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
  const at::BFloat16* rows[MAX_TILES * TILE_ROWS] = {};
  p.each_row(it, [&](int64_t r, int64_t token, int64_t head) {
    rows[r] = p.q + token * p.q_token + head * p.q_head;
    w.position[r] = static_cast<int32_t>(p.position(it, token));
  });
  std::fill(w.position + it.rows, w.position + padded, w.position[it.rows - 1]);
  for (int64_t r0 = 0; r0 < it.rows; r0 += TILE_ROWS) {
    for (int64_t d = 0; d < p.dim; d += 32) {
      __m512i block[16];
      for (int64_t r = 0; r < 16; ++r) {
        block[r] = rows[r0 + r] ? _mm512_loadu_si512(rows[r0 + r] + d) : _mm512_setzero_si512();
      }
      transpose_16x16(block);
      std::copy_n(block, 16, w.queries + r0 / 16 * lines + d / 2);
    }
  }
}

// For `_mm512_permutex2var_epi16`: elements of two rows in turns, from element `first` / 2 on.
inline __m512i pairs_of(int first) {
  alignas(64) static constexpr auto order = [] {
    std::array<int16_t, 64> index{};
    for (int i = 0; i < 64; ++i) index[i] = static_cast<int16_t>(i / 2 + (i % 2) * 32);
    return index;
  }();
  return _mm512_load_si512(order.data() + first);
}

// Interleaves the values of two neighbouring keys; keys past the end count as zero, because the
// cache holds anything there and 0 * NaN is not 0.
inline void load_values(const Bf16Problem& p, const Item& it, int64_t k0, int64_t keys,
                        Workspace& w) {
  const __m512i low = pairs_of(0), high = pairs_of(32);
  const int64_t end = std::min<int64_t>(k0 + keys, it.key_end);
  for (int64_t j = 0; j < keys; j += 2) {
    const bool first = k0 + j < end, second = k0 + j + 1 < end;
    const at::BFloat16* a =
        first ? p.v + w.places[j / KEY_TILE] + j % KEY_TILE * p.token_stride : nullptr;
    const at::BFloat16* b = second ? a + p.token_stride : nullptr;
    __m512i* to = w.values + j / 2 * (p.dim / 16);
    for (int64_t d = 0; d < p.dim; d += 32) {
      const __m512i x = first ? _mm512_loadu_si512(a + d) : _mm512_setzero_si512();
      const __m512i y = second ? _mm512_loadu_si512(b + d) : _mm512_setzero_si512();
      *to++ = _mm512_permutex2var_epi16(x, low, y);
      *to++ = _mm512_permutex2var_epi16(x, high, y);
    }
  }
}

// scores[tile][key][query] = k . q for the `keys` (a multiple of 16) keys whose places are noted.
template <int TILES>
void score_keys(const Bf16Problem& p, int64_t keys, Workspace& w) {
  for (int64_t j = 0; j < keys; j += 16) {
    const at::BFloat16* k = p.k + w.places[j / KEY_TILE];
    const __m512i* q = w.queries;
    const int64_t tile_lines = p.dim / 2, stride = p.token_stride * 2;
    _tile_zero(0);
    if constexpr (TILES > 1) _tile_zero(1);
    if constexpr (TILES > 2) _tile_zero(2);
    if constexpr (TILES > 3) _tile_zero(3);
    for (int64_t d = 0; d < p.dim; d += 32, q += 16) {
      _tile_loadd(4, k + d, stride);
      _tile_loadd(5, q, 64);
      _tile_dpbf16ps(0, 4, 5);
      if constexpr (TILES > 1) {
        _tile_loadd(6, q + tile_lines, 64);
        _tile_dpbf16ps(1, 4, 6);
      }
      if constexpr (TILES > 2) {
        _tile_loadd(5, q + 2 * tile_lines, 64);
        _tile_dpbf16ps(2, 4, 5);
      }
      if constexpr (TILES > 3) {
        _tile_loadd(6, q + 3 * tile_lines, 64);
        _tile_dpbf16ps(3, 4, 6);
      }
    }
    float* s = w.scores + j * 16;
    _tile_stored(0, s, 64);
    if constexpr (TILES > 1) _tile_stored(1, s + KEY_BLOCK * 16, 64);
    if constexpr (TILES > 2) _tile_stored(2, s + 2 * KEY_BLOCK * 16, 64);
    if constexpr (TILES > 3) _tile_stored(3, s + 3 * KEY_BLOCK * 16, 64);
  }
}

// 2^x for x <= 0 within 8e-5, for weights that are rounded to bfloat16. What is not seen weighs
// 2^-126, which is nothing beside the largest weight of 1.
[[gnu::always_inline]] inline __m512 weight_ps(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-126.0f));
  const __m512 magic = _mm512_set1_ps(12582912.0f);  // its last bit counts ones
  const __m512 shifted = _mm512_add_ps(x, magic);
  const __m512 f = _mm512_sub_ps(x, _mm512_sub_ps(shifted, magic));
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(5.51716669e-2f), f, _mm512_set1_ps(0.242611135f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.693260987f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.999928073f));
  const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), exponent));
}

// Turns the scores of one tile into weights 2^(s - maximum), packed as AMX's left operand, or as
// its right one for values that are turned, and rescales what was summed before. `sums`, `maximum`,
// `total` are this tile's. `meanwhile` is called every 32 keys: tiles that it multiplies go on
// beside the vectors.
template <typename Meanwhile>
void soften(const Bf16Problem& p, const Item& it, int tile, int64_t k0, int64_t keys,
            const Partial& o, Workspace& w, Meanwhile& meanwhile) {
  float* s = w.scores + tile * KEY_BLOCK * 16;
  const int64_t r0 = tile * TILE_ROWS;
  const int32_t* position = w.position + r0;
  const bool cut = k0 + keys - 1 > position[0] || k0 + keys > it.key_end ||
                   (p.window > 0 && position[15] - p.window >= k0);
  const __m512 factor = _mm512_set1_ps(p.softcap > 0 ? 1.0f : p.scale * LOG2_E);
  if (p.softcap > 0) {  // cap * tanh(x / cap), tanh(y) = 1 - 2 / (e^2y + 1)
    const __m512 inner = _mm512_set1_ps(2.0f * LOG2_E * p.scale / p.softcap);
    const __m512 cap = _mm512_set1_ps(p.softcap * LOG2_E), one = _mm512_set1_ps(1.0f);
    for (int64_t j = 0; j < keys; ++j) {
      const __m512 x = _mm512_min_ps(_mm512_mul_ps(_mm512_loadu_ps(s + j * 16), inner),
                                     _mm512_set1_ps(60.0f));
      const __m512 half = _mm512_div_ps(one, _mm512_add_ps(exp2_ps(x), one));
      const __m512 tanh = _mm512_fnmadd_ps(_mm512_set1_ps(2.0f), half, one);
      _mm512_storeu_ps(s + j * 16, _mm512_mul_ps(cap, tanh));
    }
  }
  const __m512 nothing = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  __m512 top = nothing;
  if (cut) {
    const __m512i at = _mm512_load_si512(position);
    const __m512i reach = _mm512_set1_epi32(p.window > 0 ? p.window : INT32_MAX);
    for (int64_t j = 0; j < keys; ++j) {
      const __m512i behind = _mm512_sub_epi32(at, _mm512_set1_epi32(k0 + j));
      const __mmask16 seen = _mm512_cmpge_epi32_mask(behind, _mm512_setzero_si512()) &
                             _mm512_cmplt_epi32_mask(behind, reach) &
                             (k0 + j < it.key_end ? 0xffff : 0);
      const __m512 x = _mm512_mask_loadu_ps(nothing, seen, s + j * 16);
      _mm512_storeu_ps(s + j * 16, x);
      top = _mm512_max_ps(top, x);
    }
  } else {
    for (int64_t j = 0; j < keys; ++j) top = _mm512_max_ps(top, _mm512_loadu_ps(s + j * 16));
  }
  const __m512 before = _mm512_loadu_ps(o.maximum + r0);
  const __m512 maximum = _mm512_max_ps(before, _mm512_mul_ps(top, factor));
  const __m512 shrink = exp2_ps(_mm512_sub_ps(before, maximum));
  __m512 total = _mm512_mul_ps(_mm512_loadu_ps(o.total + r0), shrink);
  alignas(32) static constexpr int16_t interleave[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                         21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                         11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i order = _mm512_loadu_si512(interleave);
  for (int64_t j0 = 0; j0 < keys; j0 += 32) {
    __m512i pairs[16];
    for (int64_t i = 0; i < 16; ++i) {
      const float* from = s + (j0 + 2 * i) * 16;
      const __m512 a = weight_ps(_mm512_fmsub_ps(_mm512_loadu_ps(from), factor, maximum));
      const __m512 b = weight_ps(_mm512_fmsub_ps(_mm512_loadu_ps(from + 16), factor, maximum));
      total = _mm512_add_ps(total, _mm512_add_ps(a, b));
      const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a));
      pairs[i] = _mm512_permutexvar_epi16(order, both);
    }
    meanwhile();
    if constexpr (!Meanwhile::TURNED) transpose_16x16(pairs);
    std::copy_n(pairs, 16, w.weights_of(tile) + j0 / 2);
  }
  _mm512_storeu_ps(o.maximum + r0, maximum);
  _mm512_storeu_ps(o.total + r0, total);
  if (_mm512_cmpneq_ps_mask(before, maximum) == 0) return;
  if constexpr (Meanwhile::TURNED) {
    float* sums = o.sums + r0 * p.dim;
    for (int64_t d = 0; d < p.dim; ++d) {
      _mm512_storeu_ps(sums + d * 16, _mm512_mul_ps(_mm512_loadu_ps(sums + d * 16), shrink));
    }
  } else {
    alignas(64) float by[16];
    _mm512_store_ps(by, shrink);
    for (int64_t r = 0; r < 16; ++r) {
      float* sums = o.sums + (r0 + r) * p.dim;
      const __m512 b = _mm512_set1_ps(by[r]);
      for (int64_t d = 0; d < p.dim; d += 16) {
        _mm512_storeu_ps(sums + d, _mm512_mul_ps(_mm512_loadu_ps(sums + d), b));
      }
    }
  }
}

// sums[tile] += weights x values of one block of keys, 32 keys a step and, when WIDE, 64 columns of
// the result at a time, otherwise 32.
template <bool WIDE>
class Adding {
 public:
  static constexpr bool TURNED = false;

  Adding(const Bf16Problem& p, int64_t keys, const Partial& o, const Workspace& w)
      : p_(p), o_(o), w_(w), keys_(keys), at_once_((p.dim + COLUMNS - 1) / COLUMNS), d_(p.dim) {}

  void begin(int tile) {
    finish();
    weights_ = w_.weights_of(tile);
    sums_ = o_.sums + tile * TILE_ROWS * p_.dim;
    d_ = j_ = 0;
  }
  // As many steps as bring a tile to its end in the time of another's softmax.
  [[gnu::always_inline]] void operator()() {
    for (int64_t i = 0; i < at_once_ && d_ < p_.dim; ++i) step();
  }
  void finish() {
    while (d_ < p_.dim) step();
  }

 private:
  static constexpr int64_t COLUMNS = WIDE ? 64 : 32;

  [[gnu::always_inline]] void step() {
    const int64_t stride = p_.dim * 4;
    float* sums = sums_ + d_;
    if (j_ == 0) {
      _tile_loadd(0, sums, stride);
      _tile_loadd(1, sums + 16, stride);
      if constexpr (WIDE) {
        _tile_loadd(2, sums + 32, stride);
        _tile_loadd(3, sums + 48, stride);
      }
    }
    const __m512i* v = w_.values + (j_ / 2 * p_.dim + d_) / 16;
    _tile_loadd(4, weights_ + j_ / 2, 64);
    _tile_loadd(5, v, stride);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, v + 1, stride);
    _tile_dpbf16ps(1, 4, 6);
    if constexpr (WIDE) {
      _tile_loadd(5, v + 2, stride);
      _tile_dpbf16ps(2, 4, 5);
      _tile_loadd(6, v + 3, stride);
      _tile_dpbf16ps(3, 4, 6);
    }
    if ((j_ += 32) < keys_) return;
    _tile_stored(0, sums, stride);
    _tile_stored(1, sums + 16, stride);
    if constexpr (WIDE) {
      _tile_stored(2, sums + 32, stride);
      _tile_stored(3, sums + 48, stride);
    }
    j_ = 0;
    d_ += COLUMNS;
  }

  const Bf16Problem& p_;
  const Partial& o_;
  const Workspace& w_;
  int64_t keys_, at_once_, d_, j_ = 0;  // d_: the columns in progress, p_.dim when none are
  const __m512i* weights_ = nullptr;
  float* sums_ = nullptr;
};

// Every tile's sums while the next one's scores become weights.
template <typename Adding>
void soften_and_add(const Bf16Problem& p, const Item& it, int tiles, int64_t k0, int64_t keys,
                    const Partial& o, Workspace& w, Adding adding) {
  for (int tile = 0; tile < tiles; ++tile) {
    soften(p, it, tile, k0, keys, o, w, adding);
    adding.begin(tile);
  }
  adding.finish();
}

// Fetches keys k0 and on of an item, with their values, into the second-level cache.
FETCHES void fetch_keys(const Bf16Problem& p, const Item& it, int64_t k0, int64_t keys) {
  const int64_t end = std::min<int64_t>(k0 + keys, it.key_end);
  for (int64_t j = k0; j < end; ++j) {
    const int64_t at = p.offset(it, j);
    for (int64_t d = 0; d < p.dim; d += 32) {
      _mm_prefetch(reinterpret_cast<const char*>(p.k + at + d), _MM_HINT_T1);
      _mm_prefetch(reinterpret_cast<const char*>(p.v + at + d), _MM_HINT_T1);
    }
  }
}

#endif

}  // namespace tandem
