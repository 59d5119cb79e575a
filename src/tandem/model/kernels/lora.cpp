// LoRA's halves packed for `Updates`; see lora.h.
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <cstring>

#include "lora.h"

namespace tandem {
namespace {

#ifdef TANDEM_AMX

int64_t padded(int64_t n) { return (n + SIDE - 1) / SIDE; }

// Rows [rows, width] to zeroed panels of `steps`; panels are independent of each other.
void pack_into(const at::Tensor& weight, BFloat16* to, int64_t steps) {
  const int64_t rows = weight.size(0), width = weight.size(1);
  const BFloat16* from = weight.const_data_ptr<BFloat16>();
  const int64_t pairs = width / 2, grain = std::max<int64_t>(1, 8192 / std::max<int64_t>(1, width));
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      BFloat16* panel = to + row / SIDE * steps * STEP + row / 16 % 2 * STEP / 2 + row % 16 * 2;
      const BFloat16* x = from + row * width;
      for (int64_t i = 0; i < pairs; ++i) {
        std::memcpy(panel + i / 16 * STEP + i % 16 * SIDE, x + 2 * i, 2 * sizeof(BFloat16));
      }
      if (width % 2 != 0) panel[pairs / 16 * STEP + pairs % 16 * SIDE] = x[width - 1];
    }
  });
}

// The halves a [rank, k] and b [out, rank] of layers over the same input: the panels of all a, each
// rank padded to a multiple of 32, and then those of each b.
std::vector<at::Tensor> pack_lora(at::TensorList a, at::TensorList b) {
  TORCH_CHECK(!a.empty() && a.size() == b.size(), "both halves of each layer");
  const int64_t width = a[0].size(1), steps = width / SIDE;
  int64_t columns = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    TORCH_CHECK(a[i].is_contiguous() && b[i].is_contiguous() && a[i].dim() == 2 &&
                    b[i].dim() == 2 && a[i].scalar_type() == at::kBFloat16 &&
                    b[i].scalar_type() == at::kBFloat16 && a[i].size(1) == width &&
                    width % SIDE == 0 && a[i].size(0) == b[i].size(1),
                "dense bfloat16 halves that fit together, inputs a multiple of ", SIDE);
    columns += padded(a[i].size(0));
  }
  std::vector<at::Tensor> packed{at::zeros({columns, steps, 2, 16, SIDE}, a[0].options())};
  BFloat16* to = packed[0].mutable_data_ptr<BFloat16>();
  for (size_t i = 0; i < a.size(); ++i) {
    pack_into(a[i], to, steps);
    const int64_t rank = padded(a[i].size(0));
    to += rank * steps * STEP;
    packed.push_back(at::zeros({padded(b[i].size(0)), rank, 2, 16, SIDE}, b[i].options()));
    pack_into(b[i], packed.back().mutable_data_ptr<BFloat16>(), rank);
  }
  return packed;
}

#endif

TORCH_LIBRARY_FRAGMENT(tandem, m) {
#ifdef TANDEM_AMX
  m.def("pack_lora(Tensor[] a, Tensor[] b) -> Tensor[]");
#endif
}

#ifdef TANDEM_AMX
TORCH_LIBRARY_IMPL(tandem, CPU, m) { m.impl("pack_lora", pack_lora); }
#endif

}  // namespace
}  // namespace tandem
