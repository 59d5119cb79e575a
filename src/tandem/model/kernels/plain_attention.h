// The path of paged attention for every dtype and processor: products in float32, in registers.
//
// Keys and values of a block are laid out in panels of 16 columns, so that scores (queries x keys)
// and sums (weights x values) are the same small product: some rows of the left operand, one panel.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "attention.h"
#include "vectors.h"

namespace tandem {

constexpr int ROWS_AT_ONCE = VECTOR_BYTES == 64 ? 8 : 4;
constexpr int64_t PANEL = 16;
// Fewer rows than this are not worth panels: each key is read once for all of them.
constexpr int64_t WORTH_PANELS = 4;
// Keys between the one that is read and the one that is fetched: heads lie side by side in a token,
// so the next key of a head may be too far off for the processor to foresee.
constexpr int64_t KEYS_AHEAD = 8;

// to[r][c] (+)= sum over k of a[r][k] * panel[k][c], for ROWS_AT_ONCE rows and PANEL columns.
template <bool ADD>
inline void multiply_panel(const float* a, int64_t a_row, const float* panel, int64_t n, float* to,
                           int64_t to_row) {
  constexpr int64_t VECTORS = PANEL / LANES;
  Vector sums[ROWS_AT_ONCE][VECTORS] = {};
  for (int64_t k = 0; k < n; ++k) {
    const Vector* right = reinterpret_cast<const Vector*>(panel + k * PANEL);
#pragma GCC unroll 8
    for (int64_t r = 0; r < ROWS_AT_ONCE; ++r) {
#pragma GCC unroll 4
      for (int64_t v = 0; v < VECTORS; ++v) sums[r][v] += a[r * a_row + k] * right[v];
    }
  }
#pragma GCC unroll 8
  for (int64_t r = 0; r < ROWS_AT_ONCE; ++r) {
    Vector* at = reinterpret_cast<Vector*>(to + r * to_row);
#pragma GCC unroll 4
    for (int64_t v = 0; v < VECTORS; ++v) at[v] = ADD ? at[v] + sums[r][v] : sums[r][v];
  }
}

// 2^x for x <= 0, within two units in the last place; 0 below the normal numbers. Vectorizes.
inline float exp2_of(float x) {
  const float near = std::max(x, -126.0f);
  const float shifted = near + 12582912.0f;  // its last bit counts ones
  const float f = near - (shifted - 12582912.0f);
  float p = 1.5252734e-5f;
  p = p * f + 1.5403530e-4f;
  p = p * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  const uint32_t exponent = std::bit_cast<uint32_t>(shifted) << 23;
  return x < -126.0f ? 0.0f : std::bit_cast<float>(std::bit_cast<uint32_t>(p) + exponent);
}

// Scratch of one thread; `columns` and `rows` are padded to whole panels and register tiles.
struct PlainWorkspace {
  explicit PlainWorkspace(int64_t dim)
      : columns((dim + PANEL - 1) / PANEL * PANEL),
        lines(2 * ROWS * columns + (2 * columns + ROWS) * KEY_BLOCK) {
    queries = lines.data();
    sums = queries + ROWS * columns;
    keys = sums + ROWS * columns;
    values = keys + columns * KEY_BLOCK;
    scores = values + columns * KEY_BLOCK;
    if (columns != dim) std::fill_n(values, columns * KEY_BLOCK, 0.0f);  // what pads dims stays so
  }
  static constexpr int64_t ROWS = MAX_TILES * TILE_ROWS;
  static_assert(ROWS % ROWS_AT_ONCE == 0 && KEY_BLOCK % PANEL == 0);

  int64_t columns;
  LineFloats lines;
  float *queries, *sums;  // [row][dim]
  float *keys, *values;   // [panel of keys][dim][key], [panel of dims][key][dim]
  float* scores;          // [row][key]
  int64_t position[ROWS];
};

// One block of keys and values into panels; keys past the end are zero.
template <typename T>
void load_panels(const Problem<T>& p, const Item& it, int64_t k0, int64_t keys, PlainWorkspace& w) {
  for (int64_t j = 0; j < keys; ++j) {
    const int64_t from = p.offset(it, k0 + j);
    float* key = w.keys + j / PANEL * PANEL * w.columns + j % PANEL;
    for (int64_t d = 0; d < p.dim; ++d) key[d * PANEL] = static_cast<float>(p.k[from + d]);
    for (int64_t d0 = 0; d0 < p.dim; d0 += PANEL) {
      float* value = w.values + d0 * KEY_BLOCK + j * PANEL;
      const int64_t n = std::min(PANEL, p.dim - d0);
      for (int64_t d = 0; d < n; ++d) value[d] = static_cast<float>(p.v[from + d0 + d]);
    }
  }
  for (int64_t j = keys; j % PANEL != 0; ++j) {
    float* key = w.keys + j / PANEL * PANEL * w.columns + j % PANEL;
    for (int64_t d = 0; d < p.dim; ++d) key[d * PANEL] = 0.0f;
  }
}

// Fetches a panel of keys, with their values, into the second-level cache.
template <typename T>
FETCHES void fetch_panel(const Problem<T>& p, const Item& it, int64_t k0) {
  constexpr int64_t LINE = 64 / sizeof(T);
  const int64_t end = std::min<int64_t>(k0 + PANEL, it.key_end);
  for (int64_t j = k0; j < end; ++j) {
    const int64_t at = p.offset(it, j);
    for (int64_t d = 0; d < p.dim; d += LINE) {
      __builtin_prefetch(p.k + at + d, 0, 2);
      __builtin_prefetch(p.v + at + d, 0, 2);
    }
  }
}

// Fetches a head's key or value, of `cache`, a few places after `key`.
template <typename T>
FETCHES void fetch_ahead(const Problem<T>& p, const Item& it, const T* cache, int64_t key) {
  constexpr int64_t LINE = 64 / sizeof(T);
  if (key + KEYS_AHEAD >= it.key_end) return;
  const T* at = cache + p.offset(it, key + KEYS_AHEAD);
  for (int64_t d = 0; d < p.dim; d += LINE) __builtin_prefetch(at + d);
}

// Scores of few rows, key by key.
template <typename T>
void score_few(const Problem<T>& p, const Item& it, int64_t k0, int64_t keys, PlainWorkspace& w) {
  for (int64_t j = 0; j < keys; ++j) {
    const T* from = p.k + p.offset(it, k0 + j);
    fetch_ahead(p, it, p.k, k0 + j);
    for (int64_t r = 0; r < it.rows; ++r) {
      const float* q = w.queries + r * w.columns;
      float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
      for (int64_t d = 0; d < p.dim; ++d) dot += q[d] * static_cast<float>(from[d]);
      w.scores[r * KEY_BLOCK + j] = dot;
    }
  }
}

template <typename T>
void add_few(const Problem<T>& p, const Item& it, int64_t k0, int64_t keys, PlainWorkspace& w) {
  for (int64_t j = 0; j < keys; ++j) {
    const T* from = p.v + p.offset(it, k0 + j);
    fetch_ahead(p, it, p.v, k0 + j);
    for (int64_t r = 0; r < it.rows; ++r) {
      const float weight = w.scores[r * KEY_BLOCK + j];
      float* sums = w.sums + r * w.columns;
#pragma omp simd
      for (int64_t d = 0; d < p.dim; ++d) sums[d] += weight * static_cast<float>(from[d]);
    }
  }
}

// Turns a row's scores into weights 2^(s - maximum) and rescales what was summed before; what the
// row may not see weighs nothing.
template <typename T>
void soften_row(const Problem<T>& p, int64_t r, int64_t k0, int64_t keys, Partial o,
                PlainWorkspace& w) {
  float* s = w.scores + r * KEY_BLOCK;
  const int64_t last = w.position[r] - k0;
  const int64_t first = p.window > 0 ? std::max<int64_t>(0, last + 1 - p.window) : 0;
  const int64_t end = std::min(keys, last + 1);
  std::fill(s, s + std::min(first, keys), 0.0f);
  std::fill(s + std::max<int64_t>(end, 0), s + keys, 0.0f);
  if (first >= end) return;
  const float factor = p.scale * LOG2_E;
  if (p.softcap > 0) {
    for (int64_t j = first; j < end; ++j) {
      s[j] = p.softcap * std::tanh(s[j] * p.scale / p.softcap) * LOG2_E;
    }
  } else {
#pragma omp simd
    for (int64_t j = first; j < end; ++j) s[j] *= factor;
  }
  float maximum = o.maximum[r];
#pragma omp simd reduction(max : maximum)
  for (int64_t j = first; j < end; ++j) maximum = std::max(maximum, s[j]);
  float total = 0.0f;
#pragma omp simd reduction(+ : total)
  for (int64_t j = first; j < end; ++j) {
    s[j] = exp2_of(s[j] - maximum);
    total += s[j];
  }
  const float shrink = exp2_of(o.maximum[r] - maximum);
  o.total[r] = o.total[r] * shrink + total;
  if (o.maximum[r] == maximum) return;
  o.maximum[r] = maximum;
  float* sums = w.sums + r * w.columns;
#pragma omp simd
  for (int64_t d = 0; d < p.dim; ++d) sums[d] *= shrink;
}

template <typename T>
void attend_plain(const Problem<T>& p, const Item& it, Partial o, PlainWorkspace& w) {
  const int64_t rows = (it.rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE * ROWS_AT_ONCE;
  const bool panels = it.rows >= WORTH_PANELS;
  p.each_row(it, [&](int64_t r, int64_t token, int64_t head) {
    const T* from = p.q + token * p.q_token + head * p.q_head;
    float* to = w.queries + r * w.columns;
    for (int64_t d = 0; d < p.dim; ++d) to[d] = static_cast<float>(from[d]);
    w.position[r] = p.position(it, token);
    o.maximum[r] = NEVER;
    o.total[r] = 0.0f;
  });
  std::fill_n(w.sums, rows * w.columns, 0.0f);
  for (int64_t k0 = it.key_begin; k0 < it.key_end; k0 += KEY_BLOCK) {
    const int64_t keys = std::min<int64_t>(KEY_BLOCK, it.key_end - k0);
    if (panels) {
      load_panels(p, it, k0, keys, w);
      for (int64_t j = 0; j < keys; j += PANEL) {
        fetch_panel(p, it, k0 + KEY_BLOCK + j);
        for (int64_t r = 0; r < rows; r += ROWS_AT_ONCE) {
          multiply_panel<false>(w.queries + r * w.columns, w.columns, w.keys + j * w.columns,
                                p.dim, w.scores + r * KEY_BLOCK + j, KEY_BLOCK);
        }
      }
    } else {
      score_few(p, it, k0, keys, w);
    }
    for (int64_t r = 0; r < it.rows; ++r) soften_row(p, r, k0, keys, o, w);
    if (panels) {
      for (int64_t d = 0; d < p.dim; d += PANEL) {
        for (int64_t r = 0; r < rows; r += ROWS_AT_ONCE) {
          multiply_panel<true>(w.scores + r * KEY_BLOCK, KEY_BLOCK, w.values + d * KEY_BLOCK, keys,
                               w.sums + r * w.columns + d, w.columns);
        }
      }
    } else {
      add_few(p, it, k0, keys, w);
    }
  }
  for (int64_t r = 0; r < it.rows; ++r) {
    std::copy_n(w.sums + r * w.columns, p.dim, o.sums + r * p.dim);
  }
}

}  // namespace tandem
