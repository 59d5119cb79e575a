// Weights packed for vector registers, and the product of rows with one; how is told in panels.h.
#include "panels.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

namespace tandem {
namespace {

// Where input i of column c is in a packed weight of `pairs` pairs, in elements of its dtype.
int64_t place(int64_t c, int64_t i, int64_t pairs, bool halves) {
  const int64_t panel = (c / COLUMNS * pairs + i / 2) * 2 * COLUMNS, column = c % COLUMNS;
  return panel + (halves ? column * 2 + i % 2 : i % 2 * COLUMNS + column);
}

template <typename T, typename F>
void for_each_place(int64_t n, int64_t k, const F& f) {
  constexpr bool halves = std::is_same_v<T, at::BFloat16>;
  at::parallel_for(0, (n + COLUMNS - 1) / COLUMNS, 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin * COLUMNS; c < std::min(n, end * COLUMNS); ++c) {
      for (int64_t i = 0; i < k; ++i) f(c * k + i, place(c, i, (k + 1) / 2, halves));
    }
  });
}

void check_dtype(const at::Tensor& x) {
  TORCH_CHECK(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16,
              "float32 or bfloat16");
}

at::Tensor pack_panels(const at::Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous(), "a contiguous weight [n, k]");
  check_dtype(weight);
  const int64_t n = weight.size(0), k = weight.size(1);
  at::Tensor out = at::zeros({(n + COLUMNS - 1) / COLUMNS, (k + 1) / 2, 2 * COLUMNS},
                             weight.options());
  const auto copy = [&]<typename T>(T) {
    const T* from = weight.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    for_each_place<T>(n, k, [=](int64_t plain, int64_t packed) { to[packed] = from[plain]; });
  };
  weight.scalar_type() == at::kFloat ? copy(float{}) : copy(at::BFloat16{});
  return out;
}

at::Tensor unpack_panels(const at::Tensor& packed, int64_t n, int64_t k) {
  TORCH_CHECK(is_panels(packed, n, k), "the panels of a weight [n, k]");
  at::Tensor out = at::empty({n, k}, packed.options());
  const auto copy = [&]<typename T>(T) {
    const T* from = packed.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    for_each_place<T>(n, k, [=](int64_t plain, int64_t place) { to[plain] = from[place]; });
  };
  packed.scalar_type() == at::kFloat ? copy(float{}) : copy(at::BFloat16{});
  return out;
}

template <typename T, typename Rows, typename Stored>
void product(const at::Tensor& x, int64_t stride, const at::Tensor& packed, const float* bias,
             at::Tensor& out) {
  const int64_t k = x.size(-1), count = x.numel() / k;
  const auto rows = grouped<Rows>(x.const_data_ptr<T>(), count, k, stride);
  const auto* weight = reinterpret_cast<const typename Stored::Element*>(packed.const_data_ptr());
  run_panels<Stored, 1>(rows, weight, packed.size(0),
                        PanelsToRows<T>{out.mutable_data_ptr<T>(), nullptr, bias, out.size(-1)});
}

at::Tensor panel_linear(const at::Tensor& x, const at::Tensor& packed,
                        const std::optional<at::Tensor>& bias, int64_t n) {
  const int64_t k = x.size(-1);
  check_dtype(x);
  TORCH_CHECK(k > 0 && is_panels(packed, n, k), "x is [..., k] for the panels of a weight [n, k]");
  check_vector(bias, n, at::kFloat, "the bias");
  const bool flat = x.dim() == 1 || x.numel() == x.size(-2) * k;  // rows evenly apart
  const at::Tensor rows = flat && x.stride(-1) == 1 ? x : x.contiguous();
  const int64_t stride = rows.dim() > 1 ? rows.stride(-2) : k;
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = n;
  at::Tensor out = at::empty(sizes, x.options());
  if (out.numel() == 0) return out;
  const float* b = bias ? bias->const_data_ptr<float>() : nullptr;
  const bool halves = packed.scalar_type() == at::kBFloat16;
  if (x.scalar_type() == at::kFloat) {
    halves ? product<float, FloatRows, Halves>(rows, stride, packed, b, out)
           : product<float, FloatRows, Singles>(rows, stride, packed, b, out);
  } else {
    TORCH_CHECK(halves, "bfloat16 rows have a bfloat16 weight");
    using Rows = std::conditional_t<PAIR_PRODUCTS, PairRows, FloatRows>;
    product<at::BFloat16, Rows, Halves>(rows, stride, packed, b, out);
  }
  return out;
}

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def("pack_panels(Tensor weight) -> Tensor");
  m.def("unpack_panels(Tensor packed, int n, int k) -> Tensor");
  m.def("panel_linear(Tensor x, Tensor packed, Tensor? bias, int n) -> Tensor");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) {
  m.impl("pack_panels", pack_panels);
  m.impl("unpack_panels", unpack_panels);
  m.impl("panel_linear", panel_linear);
}

}  // namespace
}  // namespace tandem
