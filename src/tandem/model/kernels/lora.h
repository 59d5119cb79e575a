// LoRA inside a product: what each adapter adds on its own rows, as `Update`s of the product.
#pragma once

#include <ATen/ops/empty.h>

#include "matmul.h"

namespace tandem {

#ifdef TANDEM_AMX

// For `members` layers whose outputs are side by side in one product. `segments` has the first row
// and the end of each segment; `tensors` has for each what `pack_lora` made of its adapter: a, the
// factor of each of its columns, and b of every member.
class Updates {
 public:
  Updates(const at::Tensor& tiles, int64_t rows, int64_t steps, at::IntArrayRef segments,
          at::TensorList tensors, int64_t members) {
    const int64_t each = members + 2, count = static_cast<int64_t>(segments.size()) / 2;
    TORCH_CHECK(static_cast<int64_t>(tensors.size()) == count * each,
                "a, factors and every b of each segment");
    for (int64_t i = 0; i < count; ++i) {
      add(segments[2 * i], segments[2 * i + 1], rows, steps, tensors.slice(i * each, each));
    }
    if (!jobs_.empty()) multiply_all(tiles.const_data_ptr<BFloat16>(), steps);
  }
  Updates(const Updates&) = delete;
  Updates& operator=(const Updates&) = delete;

  const std::vector<Update>* list() const { return list_.empty() ? nullptr : &list_; }

 private:
  // x * a of one block of rows and one panel of a, scaled; zero outside of the segment.
  struct Job {
    const BFloat16* weight;
    const float* factors;
    BFloat16* to;
    int64_t block, start, stop;
  };

  void add(int64_t start, int64_t stop, int64_t rows, int64_t steps, at::TensorList tensors) {
    const at::Tensor &a = tensors[0], &factors = tensors[1];
    const int64_t columns = a.size(0), block = start / SIDE, end = (stop + SIDE - 1) / SIDE;
    TORCH_CHECK(start >= 0 && start < stop && stop <= rows && a.size(1) == steps &&
                    factors.numel() == columns * SIDE && factors.scalar_type() == at::kFloat,
                "segments and adapters fit the product");
    if (columns == 0) return;
    low_.push_back(at::empty({(end - block) * columns * STEP}, a.options()));
    BFloat16* low = low_.back().mutable_data_ptr<BFloat16>();
    for (int64_t b = block; b < end; ++b) {
      for (int64_t c = 0; c < columns; ++c) {
        jobs_.push_back({a.const_data_ptr<BFloat16>() + c * steps * STEP,
                         factors.const_data_ptr<float>() + c * SIDE,
                         low + ((b - block) * columns + c) * STEP, b, start, stop});
      }
    }
    int64_t column = 0, panel = 0;
    for (const at::Tensor& b : tensors.slice(2)) {
      if (b.size(1) > 0) {
        list_.push_back({Left::of_tiles(low + column * STEP, columns),
                         b.const_data_ptr<BFloat16>(), b.size(1), block, end, panel, b.size(0)});
      }
      column += b.size(1);
      panel += b.size(0);
    }
    TORCH_CHECK(column == columns, "a has the ranks of all members");
  }

  void multiply_all(const BFloat16* tiles, int64_t steps) const {
    for_each_item(static_cast<int64_t>(jobs_.size()), 1, [&](const auto& take) {
      const Tiles configured(TileConfig{});
      alignas(64) float sums[STEP];
      const auto nothing = [] {};
      for (int64_t i, end; take(i, end);) {
        const Job& job = jobs_[i];
        const Left left = Left::of_tiles(tiles, steps);
        Ahead ahead{reinterpret_cast<const char*>(job.weight) + STREAM_AHEAD, STEP_LINES};
        multiply<true>(tiles + job.block * left.block, left, job.weight, steps, true, sums, ahead,
                       {nullptr, 0}, nothing);
        const __m512 low = _mm512_loadu_ps(job.factors), high = _mm512_loadu_ps(job.factors + 16);
        for (int64_t r = 0; r < SIDE; ++r) {
          const int64_t row = job.block * SIDE + r;
          __m512i line = _mm512_setzero_si512();
          if (row >= job.start && row < job.stop) {
            line = round_32(_mm512_mul_ps(_mm512_load_ps(sums + r * SIDE), low),
                            _mm512_mul_ps(_mm512_load_ps(sums + r * SIDE + 16), high));
          }
          _mm512_storeu_si512(job.to + r * SIDE, line);
        }
      }
    });
  }

  std::vector<Update> list_;
  std::vector<Job> jobs_;
  std::vector<at::Tensor> low_;
};

#endif

}  // namespace tandem
