// Attention of whole sequences with its gradient, on AMX: what recomputing recorded layers needs.
//
// Rows are queries, keys and values of one token side by side, rotated already; sequences lie one
// after the other and see themselves alone. One work item is one head of one sequence. Scores are
// computed transposed (keys x queries), so that the softmax has one query per vector lane and the
// weights come out in the form in which the next products read them, without being turned.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <limits>
#include <memory>

#include "dense_attention.h"

namespace tandem {
namespace {

#ifdef TANDEM_AMX

using namespace dense;

// Softens one block of scores: weights go to `pairs`, the sums in [dim][64] are rescaled.
void soften(const Shape& shape, int64_t i, int64_t j, int64_t length, Scratch& w) {
  const __m512 factor = _mm512_set1_ps(shape.scale * LOG2_E);
  const __m512 nothing = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  const bool masked = cut(shape, i, j, length);
  for (int64_t q = 0; q < SIZE; q += 16) {
    const Sight sight(i * SIZE + q, shape, length);
    float* s = w.scores + q;
    __m512 top = nothing;
    for (int64_t k = 0; k < SIZE; ++k) {
      __m512 x = _mm512_mul_ps(_mm512_load_ps(s + k * SIZE), factor);
      if (masked) x = _mm512_mask_mov_ps(nothing, sight.of(j * SIZE + k), x);
      _mm512_store_ps(s + k * SIZE, x);
      top = _mm512_max_ps(top, x);
    }
    const __m512 before = _mm512_load_ps(w.maximum + q), maximum = _mm512_max_ps(before, top);
    const __m512 shrink = exp2_ps(_mm512_sub_ps(before, maximum));
    __m512 total = _mm512_mul_ps(_mm512_load_ps(w.total + q), shrink);
    for (int64_t k = 0; k < SIZE; k += 2) {
      const __m512 a = weight_of(_mm512_sub_ps(_mm512_load_ps(s + k * SIZE), maximum));
      const __m512 b = weight_of(_mm512_sub_ps(_mm512_load_ps(s + (k + 1) * SIZE), maximum));
      total = _mm512_add_ps(total, _mm512_add_ps(a, b));
      _mm512_store_si512(w.pairs + k * SIZE + 2 * q, interleaved(a, b));
    }
    _mm512_store_ps(w.maximum + q, maximum);
    _mm512_store_ps(w.total + q, total);
    if (_mm512_cmpneq_ps_mask(before, maximum) == 0) continue;
    for (size_t d = 0; d < w.sums.size() / SIZE; ++d) {
      float* at = w.sums.data() + d * SIZE + q;
      _mm512_storeu_ps(at, _mm512_mul_ps(_mm512_loadu_ps(at), shrink));
    }
  }
}

// [dim][64] floats, columns times `by`, become rows of `out`, `stride` apart.
void write_turned(const float* from, const float* by, int64_t rows, int64_t dim, BFloat16* out,
                  int64_t stride) {
  for (int64_t q = 0; q < rows; q += 16) {
    const __m512 factor = by ? _mm512_loadu_ps(by + q) : _mm512_set1_ps(1.0f);
    for (int64_t d = 0; d < dim; d += 16) {
      __m512i block[16];
      for (int64_t i = 0; i < 16; ++i) {
        const __m512 x = _mm512_loadu_ps(from + (d + i) * SIZE + q);
        block[i] = _mm512_castps_si512(_mm512_mul_ps(x, factor));
      }
      transpose_16x16(block);
      for (int64_t i = 0; i < std::min<int64_t>(16, rows - q); ++i) {
        const auto rounded = _mm512_cvtneps_pbh(_mm512_castsi512_ps(block[i]));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + (q + i) * stride + d),
                            reinterpret_cast<__m256i>(rounded));
      }
    }
  }
}

// One head of one sequence: `x` its first row of queries, keys and values.
struct Head {
  const BFloat16* x;
  int64_t head, length;
};

void attend(const Shape& shape, const Head& it, BFloat16* out, int64_t stride, float* lse,
            Scratch& w) {
  const int64_t dim = shape.dim, rows = padded(it.length);
  load_plain(it.x + it.head * dim, shape.width(), it.length, dim, w.queries);
  load_plain(it.x + shape.key_at(it.head), shape.width(), it.length, dim, w.keys);
  load_plain(it.x + shape.value_at(it.head), shape.width(), it.length, dim, w.values);
  load_over_dims(w.queries, rows, dim, w.queries_over_dims);
  load_over_rows(w.values, rows, dim, w.pairs_of_rows);
  load_turned(w.pairs_of_rows, rows, dim, w.turned);
  for (int64_t i = 0; i < rows / SIZE; ++i) {
    w.sums.assign(dim * SIZE, 0.0f);
    std::fill_n(w.maximum, SIZE, -1e30f);
    std::fill_n(w.total, SIZE, 0.0f);
    for (int64_t j = shape.first_block(i); j <= i; ++j) {
      score(w.keys, j * SIZE, w.queries_over_dims, i * SIZE, dim, w.scores);
      soften(shape, i, j, it.length, w);
      add_turned(w.turned, rows, j * SIZE, w.pairs, dim, w.sums.data());
    }
    const int64_t count = std::min(SIZE, it.length - i * SIZE);
    for (int64_t q = 0; q < SIZE; ++q) {
      if (q < count) lse[i * SIZE + q] = w.maximum[q] + std::log2(w.total[q]);
      w.total[q] = 1.0f / w.total[q];
    }
    write_turned(w.sums.data(), w.total, count, dim, out + i * SIZE * stride, stride);
  }
}

// From scores and d/d(weights) of block (i, j): weights and d/d(scores) as bfloat16, the latter
// in pairs of keys too.
void differentiate(const Shape& shape, int64_t i, int64_t j, int64_t length, Scratch& w) {
  const __m512 factor = _mm512_set1_ps(shape.scale * LOG2_E), scale = _mm512_set1_ps(shape.scale);
  const bool masked = cut(shape, i, j, length);
  for (int64_t q = 0; q < SIZE; q += 32) {
    const Sight sights[2] = {{i * SIZE + q, shape, length}, {i * SIZE + q + 16, shape, length}};
    __m512 lse[2], delta[2];
    for (int half = 0; half < 2; ++half) {
      lse[half] = _mm512_loadu_ps(w.low.data() + i * SIZE + q + 16 * half);
      delta[half] = _mm512_loadu_ps(w.delta.data() + i * SIZE + q + 16 * half);
    }
    for (int64_t k = 0; k < SIZE; k += 2) {
      __m512 weight[2][2], change[2][2];  // [key][half]
      for (int64_t n = 0; n < 2; ++n) {
        for (int half = 0; half < 2; ++half) {
          const int64_t at = (k + n) * SIZE + q + 16 * half;
          __m512 p = weight_of(_mm512_fmsub_ps(_mm512_load_ps(w.scores + at), factor, lse[half]));
          if (masked) p = _mm512_maskz_mov_ps(sights[half].of(j * SIZE + k + n), p);
          const __m512 s = _mm512_sub_ps(_mm512_load_ps(w.slopes + at), delta[half]);
          weight[n][half] = p;
          change[n][half] = _mm512_mul_ps(_mm512_mul_ps(p, s), scale);
        }
        const int64_t row = (k + n) * SIZE + q;
        _mm512_store_si512(w.weights + row, round_32(weight[n][0], weight[n][1]));
        _mm512_store_si512(w.changes + row, round_32(change[n][0], change[n][1]));
      }
      for (int half = 0; half < 2; ++half) {
        _mm512_store_si512(w.pairs + k * SIZE + 2 * (q + 16 * half),
                           interleaved(change[0][half], change[1][half]));
      }
    }
  }
}

// What the backward of one head reads and writes beside its rows. `out`, `gradient`: the head's
// part of the first row, `stride` apart; `keys`, `values`: float32 [length][dim].
struct Gradients {
  const BFloat16 *out, *gradient;
  int64_t stride;
  const float* lse;
  BFloat16* queries;
  float *keys, *values;
};

void load_for_gradient(const Shape& shape, const Head& it, const Gradients& g, Scratch& w) {
  const int64_t dim = shape.dim, rows = padded(it.length);
  load_plain(it.x + it.head * dim, shape.width(), it.length, dim, w.queries);
  load_plain(it.x + shape.key_at(it.head), shape.width(), it.length, dim, w.keys);
  load_plain(it.x + shape.value_at(it.head), shape.width(), it.length, dim, w.values);
  load_plain(g.gradient, g.stride, it.length, dim, w.gradients);
  load_over_dims(w.queries, rows, dim, w.queries_over_dims);
  load_over_dims(w.gradients, rows, dim, w.gradients_over_dims);
  load_over_rows(w.queries, rows, dim, w.queries_over_rows);
  load_over_rows(w.gradients, rows, dim, w.gradients_over_rows);
  load_over_rows(w.keys, rows, dim, w.pairs_of_rows);
  load_turned(w.pairs_of_rows, rows, dim, w.turned);
  // Rows past the end: weights of zero.
  w.low.assign(rows, 1e30f);
  w.delta.assign(rows, 0.0f);
  for (int64_t r = 0; r < it.length; ++r) {
    w.low[r] = g.lse[r];
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < dim; ++d) {
      sum += widen(g.out[r * g.stride + d]) * widen(g.gradient[r * g.stride + d]);
    }
    w.delta[r] = sum;
  }
}

void attend_gradient(const Shape& shape, const Head& it, const Gradients& g, Scratch& w) {
  const int64_t dim = shape.dim, rows = padded(it.length), blocks = rows / SIZE;
  load_for_gradient(shape, it, g, w);
  w.sums.assign(rows * dim, 0.0f);  // of the queries: [block][dim][64]
  LineFloats keys(SIZE * dim), values(SIZE * dim);
  for (int64_t j = 0; j < blocks; ++j) {
    std::fill(keys.begin(), keys.end(), 0.0f);
    std::fill(values.begin(), values.end(), 0.0f);
    for (int64_t i = j; i < blocks && shape.first_block(i) <= j; ++i) {
      score(w.keys, j * SIZE, w.queries_over_dims, i * SIZE, dim, w.scores);
      score(w.values, j * SIZE, w.gradients_over_dims, i * SIZE, dim, w.slopes);
      differentiate(shape, i, j, it.length, w);
      add_rows(w.weights, w.gradients_over_rows, i * SIZE, dim, values.data());
      add_rows(w.changes, w.queries_over_rows, i * SIZE, dim, keys.data());
      add_turned(w.turned, rows, j * SIZE, w.pairs, dim, w.sums.data() + i * SIZE * dim);
    }
    const int64_t count = std::min(SIZE, it.length - j * SIZE) * dim;
    std::copy_n(keys.data(), count, g.keys + j * SIZE * dim);
    std::copy_n(values.data(), count, g.values + j * SIZE * dim);
  }
  for (int64_t i = 0; i < blocks; ++i) {
    write_turned(w.sums.data() + i * SIZE * dim, nullptr, std::min(SIZE, it.length - i * SIZE), dim,
                 g.queries + i * SIZE * shape.width(), shape.width());
  }
}

// Checks the shapes; `starts` gets the first row of each sequence.
Shape shape_of(const at::Tensor& qkv, at::IntArrayRef lengths, int64_t heads, int64_t kv_heads,
               double scale, int64_t window, std::vector<int64_t>& starts) {
  const int64_t dim = qkv.size(1) / (heads + 2 * kv_heads);
  int64_t rows = 0;
  for (const int64_t length : lengths) {
    starts.push_back(rows);
    rows += length;
  }
  TORCH_CHECK(amx_usable(), "the system does not grant AMX");
  TORCH_CHECK(qkv.is_contiguous() && qkv.scalar_type() == at::kBFloat16 && rows == qkv.size(0) &&
                  dim % 32 == 0 && qkv.size(1) == (heads + 2 * kv_heads) * dim &&
                  heads % kv_heads == 0,
              "dense bfloat16 rows of all sequences, heads a multiple of 32 wide");
  return {heads, kv_heads, dim, window, static_cast<float>(scale)};
}

// Calls f(sequence, head, scratch) for all.
template <typename F>
void for_each_head(int64_t sequences, int64_t heads, const F& f) {
  for_each_item(sequences * heads, 1, [&](const auto& take) {
    const Tiles tiles(TileConfig{});
    auto scratch = std::make_unique<Scratch>();
    for (int64_t item, end; take(item, end);) f(item / heads, item % heads, *scratch);
  });
}

// Attention of rows [T, (heads + 2 kv_heads) dim]; also log2 of the sum of weights [heads, T].
std::tuple<at::Tensor, at::Tensor> dense_attention(const at::Tensor& qkv, at::IntArrayRef lengths,
                                                   int64_t heads, int64_t kv_heads, double scale,
                                                   int64_t window) {
  std::vector<int64_t> starts;
  const Shape shape = shape_of(qkv, lengths, heads, kv_heads, scale, window, starts);
  const int64_t rows = qkv.size(0), stride = heads * shape.dim;
  at::Tensor out = at::empty({rows, stride}, qkv.options());
  at::Tensor lse = at::empty({heads, rows}, qkv.options().dtype(at::kFloat));
  BFloat16* to = out.mutable_data_ptr<BFloat16>();
  float* sums = lse.mutable_data_ptr<float>();
  const BFloat16* from = qkv.const_data_ptr<BFloat16>();
  for_each_head(lengths.size(), heads, [&](int64_t s, int64_t head, Scratch& scratch) {
    const Head it{from + starts[s] * shape.width(), head, lengths[s]};
    attend(shape, it, to + starts[s] * stride + head * shape.dim, stride,
           sums + head * rows + starts[s], scratch);
  });
  return {out, lse};
}

// d/d(qkv) of `dense_attention`, given what it returned and d/d(out).
at::Tensor dense_attention_gradient(const at::Tensor& qkv, const at::Tensor& out,
                                    const at::Tensor& lse, const at::Tensor& gradient,
                                    at::IntArrayRef lengths, int64_t heads, int64_t kv_heads,
                                    double scale, int64_t window) {
  std::vector<int64_t> starts;
  const Shape shape = shape_of(qkv, lengths, heads, kv_heads, scale, window, starts);
  const int64_t rows = qkv.size(0), dim = shape.dim, stride = heads * dim;
  TORCH_CHECK(out.is_contiguous() && gradient.is_contiguous() && lse.is_contiguous() &&
                  out.numel() == rows * stride && gradient.numel() == out.numel() &&
                  lse.numel() == heads * rows && gradient.scalar_type() == at::kBFloat16,
              "what the forward gave, dense");
  at::Tensor result = at::empty_like(qkv);
  at::Tensor parts = at::empty({2, heads, rows, dim}, lse.options());
  BFloat16* to = result.mutable_data_ptr<BFloat16>();
  float *keys = parts.mutable_data_ptr<float>(), *values = keys + heads * rows * dim;
  for_each_head(lengths.size(), heads, [&](int64_t s, int64_t head, Scratch& scratch) {
    const int64_t at = starts[s] * stride + head * dim, part = (head * rows + starts[s]) * dim;
    const Head it{qkv.const_data_ptr<BFloat16>() + starts[s] * shape.width(), head, lengths[s]};
    attend_gradient(shape, it,
                    {out.const_data_ptr<BFloat16>() + at, gradient.const_data_ptr<BFloat16>() + at,
                     stride, lse.const_data_ptr<float>() + head * rows + starts[s],
                     to + starts[s] * shape.width() + head * dim, keys + part, values + part},
                    scratch);
  });
  const int64_t group = heads / kv_heads;
  at::parallel_for(0, rows, 64, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < 2 * kv_heads; ++h) {
        const float* from = (h < kv_heads ? keys : values) + (h % kv_heads * group * rows + t) * dim;
        BFloat16* row = to + t * shape.width() + (heads + h) * dim;
        for (int64_t d = 0; d < dim; d += 16) {
          __m512 sum = _mm512_setzero_ps();
          for (int64_t g = 0; g < group; ++g) {
            sum = _mm512_add_ps(sum, _mm512_loadu_ps(from + g * rows * dim + d));
          }
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + d),
                              reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(sum)));
        }
      }
    }
  });
  return result;
}

#endif

TORCH_LIBRARY_FRAGMENT(tandem, m) {
#ifdef TANDEM_AMX
  m.def(
      "dense_attention(Tensor qkv, int[] lengths, int heads, int kv_heads, float scale, "
      "int window) -> (Tensor, Tensor)");
  m.def(
      "dense_attention_gradient(Tensor qkv, Tensor out, Tensor lse, Tensor gradient, "
      "int[] lengths, int heads, int kv_heads, float scale, int window) -> Tensor");
#endif
}

#ifdef TANDEM_AMX
TORCH_LIBRARY_IMPL(tandem, CPU, m) {
  m.impl("dense_attention", dense_attention);
  m.impl("dense_attention_gradient", dense_attention_gradient);
}
#endif

}  // namespace
}  // namespace tandem
