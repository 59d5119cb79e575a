// Weights packed for AMX, and the product of rows with one of them; how is told in matmul.h.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "matmul.h"

namespace tandem {

#ifdef TANDEM_AMX

at::Tensor pack_rows(const at::Tensor& x, int64_t rows, int64_t stride, int64_t steps) {
  const int64_t halves = (rows + SIDE - 1) / SIDE * 2;
  at::Tensor out = at::empty({halves * steps * STEP / 2}, x.options());
  const BFloat16* from = x.const_data_ptr<BFloat16>();
  BFloat16* to = out.mutable_data_ptr<BFloat16>();
  at::parallel_for(0, halves, 2, [&](int64_t begin, int64_t end) {
    for (int64_t h = begin; h < end; ++h) {
      for (int64_t s = 0; s < steps; ++s) {
        BFloat16* tile = to + ((h / 2 * steps + s) * 2 + h % 2) * STEP / 2;
        for (int64_t r = 0; r < 16; ++r) {
          const int64_t row = h * 16 + r;
          const __m512i line = row < rows ? _mm512_loadu_si512(from + row * stride + s * SIDE)
                                          : _mm512_setzero_si512();
          _mm512_storeu_si512(tile + r * SIDE, line);
        }
      }
    }
  });
  return out;
}

namespace {

at::Tensor pack_weight(const at::Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous() && weight.size(1) % SIDE == 0 &&
                  weight.scalar_type() == at::kBFloat16,
              "a contiguous bfloat16 weight [n, k] with k a multiple of ", SIDE);
  const int64_t n = weight.size(0), pairs = weight.size(1) / 2, steps = weight.size(1) / SIDE;
  const int64_t panels = (n + SIDE - 1) / SIDE;
  at::Tensor out = at::zeros({panels, steps, 2, 16, SIDE}, weight.options());
  const int32_t* from = reinterpret_cast<const int32_t*>(weight.const_data_ptr<BFloat16>());
  int32_t* to = reinterpret_cast<int32_t*>(out.mutable_data_ptr<BFloat16>());
  at::parallel_for(0, panels * 2, 1, [&](int64_t begin, int64_t end) {
    for (int64_t half = begin; half < end; ++half) {
      for (int64_t c = 0; c < std::min<int64_t>(16, n - half * 16); ++c) {
        const int32_t* row = from + (half * 16 + c) * pairs;
        int32_t* panel = to + half / 2 * steps * STEP / 2 + half % 2 * STEP / 4 + c;
        for (int64_t i = 0; i < pairs; ++i) panel[i / 16 * STEP / 2 + i % 16 * 16] = row[i];
      }
    }
  });
  return out;
}

at::Tensor unpack_weight(const at::Tensor& packed, int64_t n) {
  const int64_t steps = packed.size(1);
  at::Tensor out = at::empty({n, steps * SIDE}, packed.options());
  const BFloat16* from = packed.const_data_ptr<BFloat16>();
  BFloat16* to = out.mutable_data_ptr<BFloat16>();
  at::parallel_for(0, n, 64, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      unpack_row(from, row, steps, to + row * steps * SIDE);
    }
  });
  return out;
}

at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& packed,
                         const std::optional<at::Tensor>& bias, int64_t n) {
  const int64_t steps = packed.size(1), k = steps * SIDE;
  TORCH_CHECK(amx_usable(), "the system does not grant AMX");
  TORCH_CHECK(x.dim() >= 1 && x.size(-1) == k && x.scalar_type() == at::kBFloat16,
              "x is bfloat16 [..., ", k, "]");
  TORCH_CHECK(!bias || (bias->scalar_type() == at::kFloat && bias->is_contiguous() &&
                        bias->numel() == packed.size(0) * SIDE),
              "the bias is float32, padded like the weight");
  const bool flat = x.dim() == 1 || x.numel() == x.size(-2) * k;  // rows evenly apart
  const at::Tensor rows = flat && x.stride(-1) == 1 ? x : x.contiguous();
  const int64_t stride = rows.dim() > 1 ? rows.stride(-2) : k;
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = n;
  at::Tensor out = at::empty(sizes, x.options());
  const int64_t count = x.numel() / k;
  if (count == 0) return out;
  const ToRows to{out.mutable_data_ptr<BFloat16>(), nullptr,
                  bias ? bias->const_data_ptr<float>() : nullptr, count, n};
  Product p{Left::of_rows(rows.const_data_ptr<BFloat16>(), stride),
            packed.const_data_ptr<BFloat16>(), count, steps, packed.size(0)};
  at::Tensor tiles;
  if (count > SIDE) {
    tiles = pack_rows(rows, count, stride, steps);
    p.left = Left::of_tiles(tiles.const_data_ptr<BFloat16>(), steps);
  }
  run_product<1>(p, to);
  return out;
}

bool amx_linear() { return amx_usable(); }

#else

namespace {

bool amx_linear() { return false; }

#endif

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def("amx_linear() -> bool", amx_linear);
#ifdef TANDEM_AMX
  m.def("pack_weight(Tensor weight) -> Tensor");
  m.def("unpack_weight(Tensor packed, int n) -> Tensor");
  m.def("packed_linear(Tensor x, Tensor packed, Tensor? bias, int n) -> Tensor");
#endif
}

#ifdef TANDEM_AMX
TORCH_LIBRARY_IMPL(tandem, CPU, m) {
  m.impl("pack_weight", pack_weight);
  m.impl("unpack_weight", unpack_weight);
  m.impl("packed_linear", packed_linear);
}
#endif

}  // namespace
}  // namespace tandem
