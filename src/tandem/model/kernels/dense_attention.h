// What attention over whole sequences multiplies: the forms of a head's rows, the products of
// blocks of them, and who sees whom.
//
// A block is 64 queries or keys. Scores lie transposed, keys x queries, one query a vector lane.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "rows.h"

#ifdef TANDEM_AMX

namespace tandem::dense {

using at::BFloat16;

constexpr int64_t SIZE = 64;  // queries, and keys, of one block
constexpr float LOG2_E = 1.4426950408889634f;

struct Shape {
  int64_t heads, kv_heads, dim, window;
  float scale;

  int64_t width() const { return (heads + 2 * kv_heads) * dim; }
  int64_t kv_head(int64_t head) const { return head / (heads / kv_heads); }
  int64_t key_at(int64_t head) const { return (heads + kv_head(head)) * dim; }
  int64_t value_at(int64_t head) const { return key_at(head) + kv_heads * dim; }
  // First block of keys that the queries of block i may see.
  int64_t first_block(int64_t i) const {
    return window > 0 ? std::max<int64_t>(0, i * SIZE - window + 1) / SIZE : 0;
  }
};

// A little more than the rows: a power of two would put all dimensions into the same cache sets.
inline int64_t columns_of(int64_t rows) { return rows + 32; }
inline int64_t padded(int64_t length) { return (length + SIZE - 1) / SIZE * SIZE; }

// The forms of the rows of one head of one sequence, padded with zeros to whole blocks.
using Form = std::vector<__m512i>;
inline const BFloat16* bf16(const Form& form) { return reinterpret_cast<const BFloat16*>(form.data()); }

// Rows as they are: the left operand.
inline void load_plain(const BFloat16* from, int64_t stride, int64_t length, int64_t dim, Form& to) {
  to.assign(padded(length) * dim / 32, _mm512_setzero_si512());
  for (int64_t r = 0; r < length; ++r) {
    for (int64_t d = 0; d < dim / 32; ++d) {
      to[r * dim / 32 + d] = _mm512_loadu_si512(from + r * stride + d * 32);
    }
  }
}

// Pairs of dimensions of 16 rows: the right operand of a product over dimensions.
// [16 rows][dim / 2][row]
inline void load_over_dims(const Form& plain, int64_t rows, int64_t dim, Form& to) {
  to.resize(plain.size());
  for (int64_t r0 = 0; r0 < rows; r0 += 16) {
    for (int64_t d = 0; d < dim / 32; ++d) {
      __m512i block[16];
      for (int64_t r = 0; r < 16; ++r) block[r] = plain[(r0 + r) * dim / 32 + d];
      transpose_16x16(block);
      std::copy_n(block, 16, to.begin() + r0 * dim / 32 + d * 16);
    }
  }
}

// Pairs of rows: the right operand of a product over rows. [pair of rows][dim]
inline void load_over_rows(const Form& plain, int64_t rows, int64_t dim, Form& to) {
  alignas(64) static constexpr auto order = [] {
    std::array<int16_t, 64> index{};
    for (int i = 0; i < 64; ++i) index[i] = static_cast<int16_t>(i / 2 + (i % 2) * 32);
    return index;
  }();
  const __m512i low = _mm512_load_si512(order.data()), high = _mm512_load_si512(&order[32]);
  const int64_t lines = dim / 32;
  to.resize(plain.size());
  for (int64_t r = 0; r < rows; r += 2) {
    for (int64_t d = 0; d < lines; ++d) {
      const __m512i x = plain[r * lines + d], y = plain[(r + 1) * lines + d];
      to[r * lines + 2 * d] = _mm512_permutex2var_epi16(x, low, y);
      to[r * lines + 2 * d + 1] = _mm512_permutex2var_epi16(x, high, y);
    }
  }
}

// Turned: [dim][columns], the left operand of a product over rows; `by_rows` is `load_over_rows`'s.
inline void load_turned(const Form& by_rows, int64_t rows, int64_t dim, Form& to) {
  to.resize(dim * columns_of(rows) / 32);
  for (int64_t p = 0; p < rows / 2; p += 16) {
    for (int64_t d = 0; d < dim; d += 16) {
      __m512i block[16];
      for (int64_t i = 0; i < 16; ++i) block[i] = by_rows[((p + i) * dim + d) / 16];
      transpose_16x16(block);
      for (int64_t i = 0; i < 16; ++i) to[((d + i) * columns_of(rows) + 2 * p) / 32] = block[i];
    }
  }
}

// out [32, 32] floats, `stride` apart, (+)= left x right over `steps` of 32. Left: rows
// `left_stride` elements apart. Right: tiles of 16 columns, `second` elements apart, whose rows of
// pairs are `right_stride` apart; the next step is `right_step` farther.
struct Right {
  const BFloat16* at;
  int64_t second, stride, step;
};

[[gnu::always_inline]] inline void block_product(const BFloat16* left, int64_t left_stride,
                                                 const Right& right, int64_t steps, bool fresh,
                                                 float* out, int64_t stride) {
  if (fresh) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, out, stride * 4);
    _tile_loadd(1, out + 16, stride * 4);
    _tile_loadd(2, out + 16 * stride, stride * 4);
    _tile_loadd(3, out + 16 * stride + 16, stride * 4);
  }
  for (int64_t s = 0; s < steps; ++s) {
    const BFloat16* r = right.at + s * right.step;
    _tile_loadd(4, left + s * 32, left_stride * 2);
    _tile_loadd(6, r, right.stride * 2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, r + right.second, right.stride * 2);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, left + 16 * left_stride + s * 32, left_stride * 2);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, out, stride * 4);
  _tile_stored(1, out + 16, stride * 4);
  _tile_stored(2, out + 16 * stride, stride * 4);
  _tile_stored(3, out + 16 * stride + 16, stride * 4);
}

// scores [64 keys][64 queries] = rows (keys) x over_dims (queries)
inline void score(const Form& keys, int64_t k0, const Form& queries, int64_t q0, int64_t dim,
           float* scores) {
  for (int64_t k = 0; k < SIZE; k += 32) {
    for (int64_t q = 0; q < SIZE; q += 32) {
      const Right right{bf16(queries) + (q0 + q) * dim, 16 * dim, 32, 512};
      block_product(bf16(keys) + (k0 + k) * dim, dim, right, dim / 32, true,
                    scores + k * SIZE + q, SIZE);
    }
  }
}

// out [64][dim] += weights [64][64] x over_rows (64 rows from r0)
inline void add_rows(const BFloat16* weights, const Form& rows, int64_t r0, int64_t dim, float* out) {
  for (int64_t k = 0; k < SIZE; k += 32) {
    for (int64_t d = 0; d < dim; d += 32) {
      const Right right{bf16(rows) + r0 * dim + 2 * d, 32, 2 * dim, 32 * dim};
      block_product(weights + k * SIZE, SIZE, right, SIZE / 32, false, out + k * dim + d, dim);
    }
  }
}

// out [dim][64] += turned (columns from c0) x pairs [32 pairs][64 queries]
inline void add_turned(const Form& turned, int64_t rows, int64_t c0, const BFloat16* pairs, int64_t dim,
                float* out) {
  const int64_t columns = columns_of(rows);
  for (int64_t d = 0; d < dim; d += 32) {
    for (int64_t q = 0; q < SIZE; q += 32) {
      const Right right{pairs + 2 * q, 32, 2 * SIZE, 32 * SIZE};
      block_product(bf16(turned) + d * columns + c0, columns, right, SIZE / 32, false,
                    out + d * SIZE + q, SIZE);
    }
  }
}

// Which of 16 queries from q see key k.
struct Sight {
  __m512i at, reach;
  int64_t length;

  Sight(int64_t q, const Shape& shape, int64_t rows)
      : at(_mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(q)),
                            _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14,
                                              15))),
        reach(_mm512_set1_epi32(shape.window > 0 ? static_cast<int>(shape.window) : INT32_MAX)),
        length(rows) {}
  __mmask16 of(int64_t k) const {
    const __m512i behind = _mm512_sub_epi32(at, _mm512_set1_epi32(static_cast<int>(k)));
    return _mm512_cmpge_epi32_mask(behind, _mm512_setzero_si512()) &
           _mm512_cmplt_epi32_mask(behind, reach) & (k < length ? 0xffff : 0);
  }
};

// Whether some query of block i does not see some key of block j.
inline bool cut(const Shape& shape, int64_t i, int64_t j, int64_t length) {
  return i == j || (shape.window > 0 && i * SIZE + SIZE - 1 - shape.window >= j * SIZE) ||
         (j + 1) * SIZE > length;
}

inline __m512i interleaved(__m512 first, __m512 second) {
  alignas(64) static constexpr int16_t order[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                    21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                    11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(order), round_32(first, second));
}

inline __m512 weight_of(__m512 exponent) {
  const __mmask16 seen = _mm512_cmp_ps_mask(exponent, _mm512_set1_ps(-126.0f), _CMP_GE_OQ);
  return _mm512_maskz_mov_ps(seen, exp2_ps(exponent));
}

// Scratch of one thread.
struct Scratch {
  Form queries, keys, values, gradients, pairs_of_rows;
  Form queries_over_dims, gradients_over_dims, queries_over_rows, gradients_over_rows;
  Form turned;
  LineFloats sums, low, delta;
  alignas(64) float scores[SIZE * SIZE], slopes[SIZE * SIZE];
  alignas(64) BFloat16 weights[SIZE * SIZE], changes[SIZE * SIZE], pairs[SIZE * SIZE];
  alignas(64) float maximum[SIZE], total[SIZE];
};

}  // namespace tandem::dense

#endif
