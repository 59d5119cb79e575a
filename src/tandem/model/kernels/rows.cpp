// The operators for RMS norm, rotary embedding and gating; rows.h has what they do to a row.
//
// Inputs may be views with any outer strides (slices of one fused projection); the last dimension
// is dense.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "rows.h"

namespace tandem {
namespace {

constexpr int64_t GRAIN = 16384;  // elements worth a thread

// Rows of a tensor of up to 4 dimensions, in order, for any outer strides.
template <typename T>
struct Rows {
  explicit Rows(const at::Tensor& x) : at(x.const_data_ptr<T>()) {
    TORCH_CHECK(x.dim() >= 1 && x.dim() <= 4 && (x.stride(-1) == 1 || x.size(-1) == 1),
                "a tensor of 1 to 4 dimensions, the last one dense");
    for (int64_t i = 0; i + 1 < x.dim(); ++i) {
      const int64_t to = 3 - (x.dim() - 1) + i;
      size[to] = x.size(i);
      stride[to] = x.stride(i);
    }
  }
  int64_t count() const { return size[0] * size[1] * size[2]; }
  const T* operator[](int64_t row) const {
    return at + row % size[2] * stride[2] + row / size[2] % size[1] * stride[1] +
           row / size[2] / size[1] * stride[0];
  }
  const T* at;
  int64_t size[3] = {1, 1, 1}, stride[3] = {0, 0, 0};
};

template <typename F>
void for_each_row(int64_t rows, int64_t width, const F& f) {
  at::parallel_for(0, rows, std::max<int64_t>(1, GRAIN / width), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) f(r);
  });
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, bool shifted) {
  const int64_t width = x.size(-1);
  TORCH_CHECK(weight.numel() == width && weight.is_contiguous() &&
                  weight.scalar_type() == x.scalar_type(),
              "one weight an element, in the same dtype");
  at::Tensor out = at::empty(x.sizes(), x.options());
  TANDEM_DISPATCH(x.scalar_type(), "rms_norm", [&] {
    const Rows<scalar_t> rows(x);
    const scalar_t* w = weight.const_data_ptr<scalar_t>();
    scalar_t* to = out.mutable_data_ptr<scalar_t>();
    for_each_row(rows.count(), width, [&](int64_t r) {
      normalise(rows[r], w, to + r * width, width, static_cast<float>(eps), shifted);
    });
  });
  return out;
}

at::Tensor rotate_heads(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const int64_t width = x.size(-1), heads = x.size(-2), angles = cos.size(-1);
  at::Tensor out = at::empty(x.sizes(), x.options());
  TORCH_CHECK(x.dim() >= 2 && cos.sizes() == sin.sizes() && angles <= width && angles % 2 == 0 &&
                  cos.numel() / angles == x.numel() / (heads * width) &&
                  cos.scalar_type() == x.scalar_type() && sin.scalar_type() == x.scalar_type(),
              "one row of cos and of sin a token, in the dtype of q and k");
  TANDEM_DISPATCH(x.scalar_type(), "rotary", [&] {
    const Rows<scalar_t> rows(x), c(cos), s(sin);
    scalar_t* to = out.mutable_data_ptr<scalar_t>();
    for_each_row(rows.count(), width, [&](int64_t r) {
      rotate(rows[r], c[r / heads], s[r / heads], to + r * width, width, angles);
    });
  });
  return out;
}

std::tuple<at::Tensor, at::Tensor> rotary(const at::Tensor& q, const at::Tensor& k,
                                          const at::Tensor& cos, const at::Tensor& sin) {
  return {rotate_heads(q, cos, sin), rotate_heads(k, cos, sin)};
}

template <typename Function>
at::Tensor gate(const at::Tensor& x, const at::Tensor& up) {
  const int64_t width = x.size(-1);
  TORCH_CHECK(x.sizes() == up.sizes() && x.scalar_type() == up.scalar_type(), "two equal shapes");
  at::Tensor out = at::empty(x.sizes(), x.options());
  TANDEM_DISPATCH(x.scalar_type(), "gate", [&] {
    const Rows<scalar_t> gates(x), ups(up);
    scalar_t* to = out.mutable_data_ptr<scalar_t>();
    for_each_row(gates.count(), width, [&](int64_t r) {
      gate_row<Function>(gates[r], ups[r], to + r * width, width);
    });
  });
  return out;
}

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps, bool shifted) -> Tensor");
  m.def("rotary(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor, Tensor)");
  m.def("silu_mul(Tensor x, Tensor up) -> Tensor");
  m.def("gelu_tanh_mul(Tensor x, Tensor up) -> Tensor");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) {
  m.impl("rms_norm", rms_norm);
  m.impl("rotary", rotary);
  m.impl("silu_mul", gate<Silu>);
  m.impl("gelu_tanh_mul", gate<GeluTanh>);
}

}  // namespace
}  // namespace tandem
