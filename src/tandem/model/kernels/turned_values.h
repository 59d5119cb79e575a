// Values of whole spans with their keys side by side, [dim][keys]: the left operand of a product
// over keys.
//
// A long prompt reads every value for each of its tiles of queries. Values that are turned once
// save turning the softmax's weights every time. Keys past the context are zero: the cache holds
// anything there, and 0 * NaN is not 0.
#pragma once

#include "attention.h"

namespace tandem {

#ifdef TANDEM_AMX

class TurnedValues {
 public:
  // Turns the values of every span that has enough rows; none where a window hides most of them.
  TurnedValues(const Bf16Problem& p, int64_t spans) : p_(p), spans_(spans) {
    if (p.dim % 64 != 0 || p.window > 0) return;
    int64_t elements = 0;
    struct Piece {
      int64_t span, kv_head, key;
    };
    std::vector<Piece> pieces;
    for (int64_t s = 0; s < spans; ++s) {
      const int64_t rows = (p.query_start[s + 1] - p.query_start[s]) * p.group;
      const int64_t keys = p.context_len[s];
      if (rows < LEAST_ROWS || keys > MOST_KEYS) continue;
      spans_[s] = {elements, columns_of(keys)};
      elements += p.kv_heads * p.dim * spans_[s].columns;
      for (int64_t h = 0; h < p.kv_heads; ++h) {
        for (int64_t k = 0; k < spans_[s].columns; k += STRIDE) pieces.push_back({s, h, k});
      }
    }
    if (pieces.empty()) return;
    lines_.resize(elements / 2);
    values_ = reinterpret_cast<at::BFloat16*>(lines_.data());
    for_each_item(static_cast<int64_t>(pieces.size()), 4, [&](const auto& take) {
      for (int64_t i, end; take(i, end);) {
        for (; i < end; ++i) turn(pieces[i].span, pieces[i].kv_head, pieces[i].key);
      }
    });
  }

  bool has(const Item& it) const { return spans_[it.span].columns > 0; }
  // Dimension 0 of the first key, and elements from one dimension to the next.
  const at::BFloat16* at(const Item& it) const { return first(it.span, it.kv_head); }
  int64_t columns(const Item& it) const { return spans_[it.span].columns; }

 private:
  static constexpr int64_t LEAST_ROWS = 256, MOST_KEYS = 4096, STRIDE = 32;
  struct Place {
    int64_t offset = 0, columns = 0;  // elements before it; none if it was not turned
  };

  // Whole steps and one more, for blocks that begin in the middle of a step; not a power of two,
  // which would put all dimensions into the same cache sets.
  static int64_t columns_of(int64_t keys) {
    const int64_t columns = (keys + STRIDE - 1) / STRIDE * STRIDE + STRIDE;
    return columns % 128 == 0 ? columns + STRIDE : columns;
  }

  at::BFloat16* first(int64_t span, int64_t kv_head) const {
    return values_ + spans_[span].offset + kv_head * p_.dim * spans_[span].columns;
  }

  // 32 keys of one head.
  void turn(int64_t span, int64_t kv_head, int64_t key) {
    const Item item{static_cast<int32_t>(span), static_cast<int32_t>(kv_head)};
    const int64_t columns = spans_[span].columns, end = p_.context_len[span];
    const at::BFloat16* rows[STRIDE];
    for (int64_t k = 0; k < STRIDE; ++k) {
      rows[k] = key + k < end ? p_.v + p_.offset(item, key + k) : nullptr;
    }
    at::BFloat16* to = first(span, kv_head) + key;
    for (int64_t d = 0; d < p_.dim; d += 32) {
      __m512i low[16], high[16];  // pairs of keys of the first and the last 16 dimensions
      for (int64_t i = 0; i < 16; ++i) {
        const auto line = [&](const at::BFloat16* row) {
          return row ? _mm512_loadu_si512(row + d) : _mm512_setzero_si512();
        };
        const __m512i x = line(rows[2 * i]), y = line(rows[2 * i + 1]);
        low[i] = _mm512_permutex2var_epi16(x, pairs_of(0), y);
        high[i] = _mm512_permutex2var_epi16(x, pairs_of(32), y);
      }
      transpose_16x16(low);
      transpose_16x16(high);
      for (int64_t i = 0; i < 16; ++i) {
        _mm512_storeu_si512(to + (d + i) * columns, low[i]);
        _mm512_storeu_si512(to + (d + 16 + i) * columns, high[i]);
      }
    }
  }

  const Bf16Problem& p_;
  std::vector<Place> spans_;
  LineFloats lines_;
  at::BFloat16* values_ = nullptr;  // all of them, in `lines_`
};

// sums[tile], [dim][16 queries], += values x weights of one block of keys, 32 keys a step and 64
// dimensions at a time.
class AddingTurned {
 public:
  static constexpr bool TURNED = true;

  AddingTurned(const Bf16Problem& p, const Item& it, const TurnedValues& values, int64_t key,
               int64_t keys, const Partial& o, const Workspace& w)
      : dim_(p.dim), columns_(values.columns(it)), keys_(keys), o_(o), w_(w), d_(p.dim),
        values_(values.at(it) + key) {}

  void begin(int tile) {
    finish();
    weights_ = w_.weights_of(tile);
    sums_ = o_.sums + tile * TILE_ROWS * dim_;
    d_ = j_ = 0;
  }
  // As many steps as bring a tile to its end in the time of another's softmax.
  [[gnu::always_inline]] void operator()() {
    for (int64_t i = 0; i < dim_ && d_ < dim_; i += 64) step();
  }
  void finish() {
    while (d_ < dim_) step();
  }

 private:
  [[gnu::always_inline]] void step() {
    float* sums = sums_ + d_ * 16;
    if (j_ == 0) {
      _tile_loadd(0, sums, 64);
      _tile_loadd(1, sums + 256, 64);
      _tile_loadd(2, sums + 512, 64);
      _tile_loadd(3, sums + 768, 64);
    }
    const at::BFloat16* v = values_ + d_ * columns_ + j_;
    const int64_t stride = columns_ * 2;
    _tile_loadd(4, weights_ + j_ / 2, 64);
    _tile_loadd(5, v, stride);
    _tile_dpbf16ps(0, 5, 4);
    _tile_loadd(6, v + 16 * columns_, stride);
    _tile_dpbf16ps(1, 6, 4);
    _tile_loadd(5, v + 32 * columns_, stride);
    _tile_dpbf16ps(2, 5, 4);
    _tile_loadd(6, v + 48 * columns_, stride);
    _tile_dpbf16ps(3, 6, 4);
    if ((j_ += 32) < keys_) return;
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
    j_ = 0;
    d_ += 64;
  }

  int64_t dim_, columns_, keys_;
  const Partial& o_;
  const Workspace& w_;
  int64_t d_, j_ = 0;  // d_: the dimensions in progress, dim_ when none are
  const at::BFloat16* values_;
  const __m512i* weights_ = nullptr;
  float* sums_ = nullptr;
};

// The sums of one tile, [dim][16 queries], become rows, by way of the scores' room.
inline void turn_back(const Bf16Problem& p, float* sums, Workspace& w) {
  for (int64_t d = 0; d < p.dim; d += 16) {
    __m512i block[16];
    for (int64_t i = 0; i < 16; ++i) block[i] = _mm512_loadu_si512(sums + (d + i) * 16);
    transpose_16x16(block);
    for (int64_t r = 0; r < 16; ++r) _mm512_storeu_si512(w.scores + r * p.dim + d, block[r]);
  }
  std::copy_n(w.scores, TILE_ROWS * p.dim, sums);
}

// One item on AMX, with tiles configured by the caller. `o` has room for whole tiles of rows.
// While it is computed, the keys and values of `next` (or null) are fetched.
inline void attend_tiles(const Bf16Problem& p, const Item& it, const Item* next,
                         const TurnedValues& turned, const Partial& o, Workspace& w) {
  const int tiles = (it.rows + TILE_ROWS - 1) / TILE_ROWS;
  const bool wide = p.dim % 64 == 0, once = turned.has(it);
  std::fill_n(o.sums, tiles * TILE_ROWS * p.dim, 0.0f);
  std::fill_n(o.maximum, tiles * TILE_ROWS, NEVER);
  std::fill_n(o.total, tiles * TILE_ROWS, 0.0f);
  load_queries(p, it, w);
  for (int64_t k0 = it.key_begin / 16 * 16; k0 < it.key_end; k0 += KEY_BLOCK) {
    const int64_t keys = std::min<int64_t>(KEY_BLOCK, (it.key_end - k0 + 15) / 16 * 16);
    const int64_t padded = (keys + 31) / 32 * 32;
    for (int64_t j = 0; j < keys; j += KEY_TILE) w.places[j / KEY_TILE] = p.offset(it, k0 + j);
    if (next != nullptr) fetch_keys(p, *next, next->key_begin + k0 - it.key_begin, keys);
    if (tiles == 1) score_keys<1>(p, keys, w);
    if (tiles == 2) score_keys<2>(p, keys, w);
    if (tiles == 3) score_keys<3>(p, keys, w);
    if (tiles == 4) score_keys<4>(p, keys, w);
    if (once) {
      soften_and_add(p, it, tiles, k0, padded, o, w,
                     AddingTurned(p, it, turned, k0, padded, o, w));
      continue;
    }
    load_values(p, it, k0, padded, w);
    if (wide) {
      soften_and_add(p, it, tiles, k0, padded, o, w, Adding<true>(p, padded, o, w));
    } else {
      soften_and_add(p, it, tiles, k0, padded, o, w, Adding<false>(p, padded, o, w));
    }
  }
  if (!once) return;
  for (int tile = 0; tile < tiles; ++tile) turn_back(p, o.sums + tile * TILE_ROWS * p.dim, w);
}

#endif

}  // namespace tandem
