// What a layer does row by row between its matrix products: RMS norm, rotary embedding, gating.
//
// Inputs may be views with any outer strides (slices of one fused projection); the last dimension
// is dense. Sums and functions are in float32; results are rounded to the dtype where
// transformers' modules round, except inside the rotation, which rounds once.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "tiles.h"

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

// Normalises one row. With `shifted` the factor is (1 + weight) in float32 and the result is
// rounded once (Gemma); otherwise the normalised row is rounded before the product (Llama).
template <typename T>
void normalise(const T* x, const T* weight, T* out, int64_t width, float eps, bool shifted) {
  float square = 0.0f;
#pragma omp simd reduction(+ : square)
  for (int64_t d = 0; d < width; ++d) square += widen(x[d]) * widen(x[d]);
  const float factor = 1.0f / std::sqrt(square / static_cast<float>(width) + eps);
  if (shifted) {
#pragma omp simd
    for (int64_t d = 0; d < width; ++d) {
      out[d] = narrow<T>(widen(x[d]) * factor * (1.0f + widen(weight[d])));
    }
  } else {
#pragma omp simd
    for (int64_t d = 0; d < width; ++d) {
      out[d] = narrow<T>(widen(narrow<T>(widen(x[d]) * factor)) * widen(weight[d]));
    }
  }
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

// Rotates the first `angles` elements of one head; the rest is copied.
template <typename T>
void rotate(const T* x, const T* cos, const T* sin, T* out, int64_t width, int64_t angles) {
  const int64_t half = angles / 2;
#pragma omp simd
  for (int64_t d = 0; d < half; ++d) {
    const float a = widen(x[d]), b = widen(x[d + half]);
    out[d] = narrow<T>(a * widen(cos[d]) - b * widen(sin[d]));
    out[d + half] = narrow<T>(b * widen(cos[d + half]) + a * widen(sin[d + half]));
  }
  std::copy(x + angles, x + width, out + angles);
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

// Both gates are x / (1 + e^-y(x)); `Function` gives y.
struct Silu {
  template <typename V>
  [[gnu::always_inline]] static V of(V x) {
    return x;
  }
};

struct GeluTanh {  // x / 2 * (1 + tanh(y / 2)) = x / (1 + e^-y)
  template <typename V>
  [[gnu::always_inline]] static V of(V x) {
    return x * (x * x * 0.07135481628f + 1.5957691216f);
  }
};

template <typename Function, typename T>
void gate_row(const T* x, const T* up, T* out, int64_t begin, int64_t end) {
#pragma omp simd
  for (int64_t d = begin; d < end; ++d) {
    const float value = widen(x[d]);
    const float gated = value / (1.0f + exponential(-Function::of(value)));
    out[d] = narrow<T>(widen(narrow<T>(gated)) * widen(up[d]));
  }
}

#ifdef TANDEM_AMX

inline __m512 load_16(const at::BFloat16* from) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// The compiler's own vectors take twice as long.
template <typename Function>
void gate_row(const at::BFloat16* x, const at::BFloat16* up, at::BFloat16* out, int64_t width) {
  const __m512 minus_log2_e = _mm512_set1_ps(-1.44269504f), one = _mm512_set1_ps(1.0f);
  int64_t d = 0;
  for (; d + 16 <= width; d += 16) {
    const __m512 value = load_16(x + d);
    const __m512 power = exp2_ps(_mm512_mul_ps(Function::of(value), minus_log2_e));
    const __m512 gated = _mm512_div_ps(value, _mm512_add_ps(one, power));
    const __m256i rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(gated));
    const __m512 wide =
        _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + d),
                        reinterpret_cast<__m256i>(
                            _mm512_cvtneps_pbh(_mm512_mul_ps(wide, load_16(up + d)))));
  }
  gate_row<Function, at::BFloat16>(x, up, out, d, width);
}

#endif

template <typename Function, typename T>
void gate_row(const T* x, const T* up, T* out, int64_t width) {
  gate_row<Function, T>(x, up, out, 0, width);
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
