// Log-probabilities of given tokens under a packed head, and their slopes, without the logits.
//
// Like attention whose keys and values are the rows of the head: of every chunk of the vocabulary
// the powers e^(logit - reference) are summed, and multiplied by the same rows for the slope. The
// reference of a row is the logit of its target, raised (and the chunk repeated) should a logit be
// so much larger that powers would overflow. Logits are rounded to bfloat16, as the model's are.
// Powers of the target are kept apart, so that a nearly certain token keeps an accurate slope.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <limits>

#include "matmul.h"

namespace tandem {
namespace {

#ifdef TANDEM_AMX

constexpr int64_t CHUNK = 256;      // panels of the head whose powers are kept at once
constexpr float MOST = 0x1p80f;     // of 32 powers; beyond, the reference is raised
constexpr int NOT_FINITE = 0x99;    // of `fpclass`: both infinities, both kinds of NaN
constexpr float LOG2_E = 1.44269504f;

// What is known of each row so far.
struct Rows {
  const int64_t* targets;
  std::vector<float> reference, chosen;  // the target's logit, estimated and as it is
  std::vector<double> others;            // sum of the powers of all other tokens
};

// Finished blocks of logits become powers (tiles of the next product, if there is one) and sums.
struct ToPowers {
  BFloat16* tiles;
  const float* bias;
  Rows& all;
  float *sums, *peaks;  // [panels, rows]; infinite where powers overflow, then with the peak
  int64_t first, panels, rows, columns;

  void claim(int64_t b, int64_t panel) const {
    if (tiles == nullptr) return;
    const char* at = reinterpret_cast<const char*>(tiles + (b * panels + panel) * STEP);
    for (int64_t i = 0; i < STEP_LINES; ++i) __builtin_prefetch(at + i * 64, 1);
  }
  void write(const std::array<const float*, 1>& block, int64_t b, int64_t panel, int64_t r) const {
    const int64_t column = (first + panel) * SIDE, width = std::min(SIDE, columns - column);
    const __mmask32 real = width == SIDE ? ~__mmask32{0} : (__mmask32{1} << width) - 1;
    const int64_t row = b * SIDE + r, place = all.targets[row] - column;
    const __m512i y = round_row(block[0] + r * SIDE, bias ? bias + column : nullptr);
    __mmask32 others = real;
    if (place >= 0 && place < SIDE) {
      alignas(64) BFloat16 logits[SIDE];
      _mm512_store_si512(logits, y);
      all.chosen[row] = static_cast<float>(logits[place]);
      others &= ~(__mmask32{1} << place);
    }
    const __m512 low = low_16(y), high = high_16(y);
    const __m512 a = powers(low, row, others), c = powers(high, row, others >> 16);
    const float sum = _mm512_reduce_add_ps(_mm512_add_ps(a, c));
    const int64_t at = panel * rows + row;
    sums[at] = sum;
    if (_mm512_mask_fpclass_ps_mask(real, low, NOT_FINITE) |
        _mm512_mask_fpclass_ps_mask(real >> 16, high, NOT_FINITE)) {
      sums[at] = std::numeric_limits<float>::quiet_NaN();
    } else if (!(sum < MOST)) {
      sums[at] = std::numeric_limits<float>::infinity();
      peaks[at] = std::max(_mm512_mask_reduce_max_ps(others, low),
                           _mm512_mask_reduce_max_ps(others >> 16, high));
    }
    if (tiles != nullptr) {
      _mm512_store_si512(tiles + (b * panels + panel) * STEP + r * SIDE, round_32(a, c));
    }
  }
  __m512 powers(__m512 logits, int64_t row, __mmask16 wanted) const {
    const __m512 above = _mm512_sub_ps(logits, _mm512_set1_ps(all.reference[row]));
    return _mm512_maskz_mov_ps(wanted, exp2_ps(_mm512_mul_ps(above, _mm512_set1_ps(LOG2_E))));
  }
};

// Finished blocks are added to float32 blocks [blocks, panels].
struct ToSums {
  float* sums;
  int64_t panels;

  void claim(int64_t b, int64_t panel) const {
    const char* at = reinterpret_cast<const char*>(sums + (b * panels + panel) * STEP);
    for (int64_t i = 0; i < 2 * STEP_LINES; ++i) __builtin_prefetch(at + i * 64, 1);
  }
  void write(const std::array<const float*, 1>& block, int64_t b, int64_t panel, int64_t r) const {
    float* to = sums + (b * panels + panel) * STEP + r * SIDE;
    const float* row = block[0] + r * SIDE;
    _mm512_store_ps(to, _mm512_add_ps(_mm512_load_ps(to), _mm512_loadu_ps(row)));
    _mm512_store_ps(to + 16, _mm512_add_ps(_mm512_load_ps(to + 16), _mm512_loadu_ps(row + 16)));
  }
};

class Score {
 public:
  Score(const at::Tensor& hidden, const at::Tensor& targets, const at::Tensor& packed,
        const float* bias, int64_t vocab, const std::optional<at::Tensor>& back)
      : rows_(hidden.size(0)), steps_(packed.size(1)), vocab_(vocab), packed_(packed), back_(back),
        bias_(bias), left_(pack_rows(hidden, rows_, steps_ * SIDE, steps_)),
        rows_of_targets_(at::empty_like(hidden)),
        slopes_(at::zeros({back ? (rows_ + SIDE - 1) / SIDE * steps_ * STEP : 0}, at::kFloat)) {
    all_.targets = targets.const_data_ptr<int64_t>();
    all_.reference.resize(rows_);
    all_.chosen.resize(rows_);
    all_.others.resize(rows_);
    BFloat16* to = rows_of_targets_.mutable_data_ptr<BFloat16>();
    const BFloat16* from = hidden.const_data_ptr<BFloat16>();
    const int64_t width = steps_ * SIDE;
    for (int64_t r = 0; r < rows_; ++r) {
      const int64_t target = all_.targets[r];
      TORCH_CHECK(target >= 0 && target < vocab, "target ", target, " is no token");
      unpack_row(packed.const_data_ptr<BFloat16>(), target, steps_, to + r * width);
      float logit = bias ? bias[target] : 0.0f;
#pragma omp simd reduction(+ : logit)
      for (int64_t i = r * width; i < (r + 1) * width; ++i) logit += widen(from[i]) * widen(to[i]);
      all_.reference[r] = logit;
    }
    for (int64_t first = 0; first < packed.size(0); first += CHUNK) add_chunk(first);
  }

  at::Tensor logprobs() const {
    at::Tensor out = at::empty({rows_}, at::kFloat);
    for (int64_t r = 0; r < rows_; ++r) {
      out.mutable_data_ptr<float>()[r] = static_cast<float>(above(r) - std::log(total(r)));
    }
    return out;
  }

  // (1 - p) of the target's row less p of each other row: in terms of the powers, over their sum.
  at::Tensor slopes() {
    if (!back_) return at::empty({0}, rows_of_targets_.options());
    BFloat16* to = rows_of_targets_.mutable_data_ptr<BFloat16>();
    const float* sums = slopes_.const_data_ptr<float>();
    at::parallel_for(0, rows_, SIDE, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const float factor = static_cast<float>(1.0 / total(r));
        const float own = static_cast<float>(all_.others[r] / total(r));
        for (int64_t s = 0; s < steps_; ++s) {
          const float* block = sums + in_tiles(r, s, steps_);
          BFloat16* row = to + (r * steps_ + s) * SIDE;
#pragma omp simd
          for (int64_t d = 0; d < SIDE; ++d) {
            row[d] = narrow<BFloat16>(own * widen(row[d]) - factor * block[d]);
          }
        }
      }
    });
    return rows_of_targets_;
  }

 private:
  double above(int64_t r) const { return static_cast<double>(all_.chosen[r]) - all_.reference[r]; }
  double total(int64_t r) const { return all_.others[r] + std::exp(above(r)); }

  void add_chunk(int64_t first) {
    const int64_t panels = std::min(CHUNK, packed_.size(0) - first);
    if (back_ && !tiles_.defined()) {
      tiles_ = at::empty({(rows_ + SIDE - 1) / SIDE * panels * STEP}, packed_.options());
    }
    BFloat16* tiles = back_ ? tiles_.mutable_data_ptr<BFloat16>() : nullptr;
    std::vector<float> sums(panels * rows_), peaks(panels * rows_);
    const Product logits{Left::of_tiles(left_.const_data_ptr<BFloat16>(), steps_),
                         packed_.const_data_ptr<BFloat16>() + first * steps_ * STEP, rows_, steps_,
                         panels};
    do {
      run_product<1>(logits, ToPowers{tiles, bias_, all_, sums.data(), peaks.data(), first, panels,
                                      rows_, vocab_});
    } while (!take(sums, peaks, panels));
    if (!back_) return;
    // The transposed weight has the tokens as its inputs, so a chunk is a part of each panel.
    const Product slopes{Left::of_tiles(tiles, panels),
                         back_->const_data_ptr<BFloat16>() + first * STEP, rows_, panels,
                         back_->size(0), back_->size(1)};
    run_product<1>(slopes, ToSums{slopes_.mutable_data_ptr<float>(), steps_});
  }

  // Adds the sums of a chunk; false if powers overflowed somewhere and must be computed again.
  bool take(const std::vector<float>& sums, const std::vector<float>& peaks, int64_t panels) {
    std::vector<double> added(rows_);
    for (int64_t p = 0; p < panels; ++p) {
      for (int64_t r = 0; r < rows_; ++r) added[r] += sums[p * rows_ + r];
    }
    bool fits = true;
    for (int64_t r = 0; r < rows_; ++r) {
      if (!std::isinf(added[r])) continue;
      fits = false;
      float peak = all_.reference[r];
      for (int64_t p = 0; p < panels; ++p) {
        if (std::isinf(sums[p * rows_ + r])) peak = std::max(peak, peaks[p * rows_ + r]);
      }
      raise(r, peak);
    }
    if (fits) {
      for (int64_t r = 0; r < rows_; ++r) all_.others[r] += added[r];
    }
    return fits;
  }

  void raise(int64_t r, float reference) {
    const double factor = std::exp(static_cast<double>(all_.reference[r]) - reference);
    all_.reference[r] = reference;
    all_.others[r] *= factor;
    if (!back_) return;
    for (int64_t s = 0; s < steps_; ++s) {
      float* block = slopes_.mutable_data_ptr<float>() + in_tiles(r, s, steps_);
      for (int64_t d = 0; d < SIDE; ++d) block[d] *= static_cast<float>(factor);
    }
  }

  int64_t rows_, steps_, vocab_;
  const at::Tensor packed_;
  const std::optional<at::Tensor> back_;
  const float* bias_;
  at::Tensor left_, rows_of_targets_, slopes_, tiles_;
  Rows all_;
};

// See `tandem.model.kernels.score`.
std::tuple<at::Tensor, at::Tensor> score_rows(const at::Tensor& hidden, const at::Tensor& targets,
                                              const at::Tensor& packed,
                                              const std::optional<at::Tensor>& bias, int64_t vocab,
                                              const std::optional<at::Tensor>& back) {
  TORCH_CHECK(amx_usable(), "the system does not grant AMX");
  TORCH_CHECK(hidden.dim() == 2 && hidden.size(1) == packed.size(1) * SIDE &&
                  hidden.scalar_type() == at::kBFloat16 && hidden.is_contiguous(),
              "hidden is dense bfloat16 [rows, ", packed.size(1) * SIDE, "]");
  TORCH_CHECK(targets.dim() == 1 && targets.size(0) == hidden.size(0) &&
                  targets.scalar_type() == at::kLong && targets.is_contiguous(),
              "one int64 target a row");
  TORCH_CHECK(vocab <= packed.size(0) * SIDE && vocab > (packed.size(0) - 1) * SIDE &&
                  (!back || (back->size(0) == packed.size(1) && back->size(1) == packed.size(0))),
              "the weights are of one head");
  if (hidden.size(0) == 0) {
    return {at::empty({0}, at::kFloat), at::empty({0, hidden.size(1)}, hidden.options())};
  }
  Score score(hidden, targets, packed, bias ? bias->const_data_ptr<float>() : nullptr, vocab, back);
  at::Tensor logprobs = score.logprobs();
  return {logprobs, score.slopes()};
}

#endif

TORCH_LIBRARY_FRAGMENT(tandem, m) {
#ifdef TANDEM_AMX
  m.def(
      "score_rows(Tensor hidden, Tensor targets, Tensor packed, Tensor? bias, int vocab, "
      "Tensor? back) -> (Tensor, Tensor)");
#endif
}

#ifdef TANDEM_AMX
TORCH_LIBRARY_IMPL(tandem, CPU, m) { m.impl("score_rows", score_rows); }
#endif

}  // namespace
}  // namespace tandem
