// Gradients of what a layer does row by row: RMS norm, and the turning of queries and keys.
//
// In float32, rounded once; rows are dense. See rows.h for the forward.
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "rows.h"

namespace tandem {
namespace {

using Optional = std::optional<at::Tensor>;

constexpr int64_t GRAIN = 16384;  // elements worth a thread

template <typename T>
const T* data_or_null(const Optional& x) {
  return x ? x->const_data_ptr<T>() : nullptr;
}

// out = d/dx of norm(x) * weight for `gradient`, plus `residual` if there is one; `out` may be
// `gradient`.
template <typename T>
void norm_row(const T* x, const T* weight, const T* gradient, const T* residual, T* out,
              int64_t width, float eps, bool shifted) {
  const float factor = norm_factor(x, width, eps), one = shifted ? 1.0f : 0.0f;
  float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
  for (int64_t d = 0; d < width; ++d) {
    dot += widen(gradient[d]) * (one + widen(weight[d])) * widen(x[d]);
  }
  const float back = dot * factor * factor * factor / static_cast<float>(width);
  if (residual != nullptr) {
#pragma omp simd
    for (int64_t d = 0; d < width; ++d) {
      const float direct = widen(gradient[d]) * (one + widen(weight[d])) * factor;
      out[d] = narrow<T>(widen(residual[d]) + direct - back * widen(x[d]));
    }
  } else {
#pragma omp simd
    for (int64_t d = 0; d < width; ++d) {
      const float direct = widen(gradient[d]) * (one + widen(weight[d])) * factor;
      out[d] = narrow<T>(direct - back * widen(x[d]));
    }
  }
}

at::Tensor rms_norm_gradient(const at::Tensor& x, const at::Tensor& weight,
                             const at::Tensor& gradient, const Optional& residual, double eps,
                             bool shifted) {
  const int64_t width = x.size(-1), rows = x.numel() / width;
  TORCH_CHECK(x.is_contiguous() && gradient.is_contiguous() && gradient.sizes() == x.sizes() &&
                  weight.numel() == width && weight.scalar_type() == x.scalar_type() &&
                  gradient.scalar_type() == x.scalar_type() &&
                  (!residual || (residual->is_contiguous() && residual->sizes() == x.sizes())),
              "dense rows alike");
  at::Tensor out = at::empty_like(x);
  TANDEM_DISPATCH(x.scalar_type(), "rms_norm_gradient", [&] {
    const scalar_t *from = x.const_data_ptr<scalar_t>(), *w = weight.const_data_ptr<scalar_t>();
    const scalar_t *g = gradient.const_data_ptr<scalar_t>(), *r = data_or_null<scalar_t>(residual);
    scalar_t* to = out.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, rows, std::max<int64_t>(1, GRAIN / width), [&](int64_t i, int64_t end) {
      for (int64_t at = i * width; i < end; ++i, at += width) {
        norm_row(from + at, w, g + at, r ? r + at : nullptr, to + at, width,
                 static_cast<float>(eps), shifted);
      }
    });
  });
  return out;
}

// The transposed rotation, in place.
template <typename T>
void rotate_back(T* x, const T* cos, const T* sin, int64_t angles) {
  const int64_t half = angles / 2;
#pragma omp simd
  for (int64_t d = 0; d < half; ++d) {
    const float a = widen(x[d]), b = widen(x[d + half]);
    x[d] = narrow<T>(a * widen(cos[d]) + b * widen(sin[d + half]));
    x[d + half] = narrow<T>(b * widen(cos[d + half]) - a * widen(sin[d]));
  }
}

// Calls f(row, head, element of its first number) for queries and keys of dense rows, which are
// `heads` + 2 `kv_heads` heads side by side.
template <typename F>
void each_turned_head(const at::Tensor& rows, int64_t heads, int64_t kv_heads, const F& f) {
  const int64_t all = heads + 2 * kv_heads, width = rows.size(1), dim = width / all;
  TORCH_CHECK(rows.dim() == 2 && rows.is_contiguous() && width == all * dim, "dense rows of heads");
  at::parallel_for(0, rows.size(0), std::max<int64_t>(1, GRAIN / width),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t t = begin; t < end; ++t) {
                       for (int64_t h = 0; h < heads + kv_heads; ++h) {
                         f(t, h, t * width + h * dim);
                       }
                     }
                   });
}

// Queries and keys normalised (if there is a weight) and rotated, values copied.
at::Tensor turn_heads(const at::Tensor& qkv, const Optional& q_norm, const Optional& k_norm,
                      double eps, bool shifted, const at::Tensor& cos, const at::Tensor& sin,
                      int64_t heads, int64_t kv_heads) {
  const int64_t dim = qkv.size(1) / (heads + 2 * kv_heads), angles = cos.size(-1);
  TORCH_CHECK(cos.is_contiguous() && sin.is_contiguous() && cos.numel() == qkv.size(0) * angles,
              "a dense row of angles a row");
  at::Tensor out = qkv.clone();
  TANDEM_DISPATCH(qkv.scalar_type(), "turn_heads", [&] {
    scalar_t* to = out.mutable_data_ptr<scalar_t>();
    const scalar_t *c = cos.const_data_ptr<scalar_t>(), *s = sin.const_data_ptr<scalar_t>();
    const scalar_t *q = data_or_null<scalar_t>(q_norm), *k = data_or_null<scalar_t>(k_norm);
    each_turned_head(out, heads, kv_heads, [&](int64_t t, int64_t h, int64_t at) {
      const scalar_t* weight = h < heads ? q : k;
      if (weight != nullptr) {
        normalise(to + at, weight, to + at, dim, static_cast<float>(eps), shifted);
      }
      rotate(to + at, c + t * angles, s + t * angles, to + at, dim, angles);
    });
  });
  return out;
}

// Turns d/d(turned) into d/d(qkv), in place.
void turn_heads_gradient(const at::Tensor& gradient, const at::Tensor& qkv, const Optional& q_norm,
                         const Optional& k_norm, double eps, bool shifted, const at::Tensor& cos,
                         const at::Tensor& sin, int64_t heads, int64_t kv_heads) {
  const int64_t dim = qkv.size(1) / (heads + 2 * kv_heads), angles = cos.size(-1);
  TORCH_CHECK(qkv.is_contiguous() && qkv.sizes() == gradient.sizes() && cos.is_contiguous() &&
                  sin.is_contiguous() && cos.numel() == qkv.size(0) * angles,
              "rows alike, and a dense row of angles a row");
  TANDEM_DISPATCH(qkv.scalar_type(), "turn_heads_gradient", [&] {
    scalar_t* to = gradient.mutable_data_ptr<scalar_t>();
    const scalar_t* from = qkv.const_data_ptr<scalar_t>();
    const scalar_t *c = cos.const_data_ptr<scalar_t>(), *s = sin.const_data_ptr<scalar_t>();
    const scalar_t *q = data_or_null<scalar_t>(q_norm), *k = data_or_null<scalar_t>(k_norm);
    each_turned_head(gradient, heads, kv_heads, [&](int64_t t, int64_t h, int64_t at) {
      rotate_back(to + at, c + t * angles, s + t * angles, angles);
      const scalar_t *weight = h < heads ? q : k, *none = nullptr;
      if (weight != nullptr) {
        norm_row(from + at, weight, to + at, none, to + at, dim, static_cast<float>(eps), shifted);
      }
    });
  });
}

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def(
      "rms_norm_gradient(Tensor x, Tensor weight, Tensor gradient, Tensor? residual, float eps, "
      "bool shifted) -> Tensor");
  m.def(
      "turn_heads(Tensor qkv, Tensor? q_norm, Tensor? k_norm, float eps, bool shifted, Tensor cos, "
      "Tensor sin, int heads, int kv_heads) -> Tensor");
  m.def(
      "turn_heads_gradient(Tensor(a!) gradient, Tensor qkv, Tensor? q_norm, Tensor? k_norm, "
      "float eps, bool shifted, Tensor cos, Tensor sin, int heads, int kv_heads) -> ()");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) {
  m.impl("rms_norm_gradient", rms_norm_gradient);
  m.impl("turn_heads", turn_heads);
  m.impl("turn_heads_gradient", turn_heads_gradient);
}

}  // namespace
}  // namespace tandem
