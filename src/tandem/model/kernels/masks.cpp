// Scores of tokens that a grammar does not allow become minus infinity.
#include <limits>

#include <ATen/Parallel.h>
#include <torch/library.h>

namespace tandem {
namespace {

constexpr int64_t BITS = 32;

void forbid_row(float* scores, const int32_t* words, int64_t vocab) {
  constexpr float forbidden = -std::numeric_limits<float>::infinity();
  for (int64_t begin = 0; begin < vocab; begin += BITS) {
    const uint32_t allowed = static_cast<uint32_t>(words[begin / BITS]);
    const int64_t count = std::min(BITS, vocab - begin);
    if (allowed == 0) {
      std::fill_n(scores + begin, count, forbidden);
    } else if (~allowed != 0) {
      // A store for each, so that the compiler makes vectors of it.
      for (int64_t bit = 0; bit < count; ++bit) {
        const float score = scores[begin + bit];
        scores[begin + bit] = allowed >> bit & 1 ? score : forbidden;
      }
    }
  }
}

void forbid_tokens(at::Tensor& scores, const at::Tensor& words, const at::Tensor& rows) {
  const int64_t vocab = scores.size(-1), count = rows.numel();
  TORCH_CHECK(scores.dim() == 2 && scores.is_contiguous() && scores.scalar_type() == at::kFloat,
              "dense float32 scores [rows, vocabulary]");
  TORCH_CHECK(words.is_contiguous() && words.scalar_type() == at::kInt && words.dim() == 2 &&
                  words.size(0) == count && words.size(1) == (vocab + BITS - 1) / BITS,
              "dense int32 words, a bit a token, one row a mask");
  TORCH_CHECK(rows.is_contiguous() && rows.scalar_type() == at::kLong, "dense int64 rows");
  const int64_t* places = rows.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK(places[i] >= 0 && places[i] < scores.size(0), "a row of the scores");
  }
  float* to = scores.mutable_data_ptr<float>();
  const int32_t* from = words.const_data_ptr<int32_t>();
  at::parallel_for(0, count, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      forbid_row(to + places[i] * vocab, from + i * words.size(1), vocab);
    }
  });
}

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def("forbid_tokens(Tensor(a!) scores, Tensor words, Tensor rows) -> ()");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) { m.impl("forbid_tokens", forbid_tokens); }

}  // namespace
}  // namespace tandem
