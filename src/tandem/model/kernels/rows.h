// What a layer does row by row: RMS norm, rotation and gating of one row, for every dtype and,
// where the processor has AMX, in its own vectors for bfloat16 (the compiler's take twice as long).
//
// Sums and functions are in float32; results are rounded to the dtype where transformers' modules
// round, except inside the rotation, which rounds once.
#pragma once

#include "tiles.h"

namespace tandem {

// 1 / root mean square of a row.
template <typename T>
float norm_factor(const T* x, int64_t width, float eps) {
  float square = 0.0f;
#pragma omp simd reduction(+ : square)
  for (int64_t d = 0; d < width; ++d) square += widen(x[d]) * widen(x[d]);
  return 1.0f / std::sqrt(square / static_cast<float>(width) + eps);
}

// With `shifted` the weight is 1 + weight in float32 and the result is rounded once (Gemma);
// otherwise the normalised row is rounded before the product (Llama).
template <typename T>
void scale_row(const T* x, const T* weight, T* out, int64_t width, float factor, bool shifted) {
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

#ifdef TANDEM_AMX

inline __m512 widen_16(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
inline __m512 low_16(__m512i x) { return widen_16(_mm512_castsi512_si256(x)); }
inline __m512 high_16(__m512i x) { return widen_16(_mm512_extracti64x4_epi64(x, 1)); }
inline __m512i round_32(__m512 low, __m512 high) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

// 32 elements of each half of a head, `half` apart, as `rotate` does.
inline void rotate_32(const at::BFloat16* x, const at::BFloat16* cos, const at::BFloat16* sin,
                      at::BFloat16* out, int64_t half) {
  const __m512i a = _mm512_loadu_si512(x), b = _mm512_loadu_si512(x + half);
  const auto turned = [](__m512i x, __m512i cos, __m512i y, __m512i sin, float sign)
                          [[gnu::always_inline]] {
    const __m512 by = _mm512_set1_ps(sign);
    const __m512 low = _mm512_mul_ps(_mm512_mul_ps(low_16(y), by), low_16(sin));
    const __m512 high = _mm512_mul_ps(_mm512_mul_ps(high_16(y), by), high_16(sin));
    return round_32(_mm512_fmadd_ps(low_16(x), low_16(cos), low),
                    _mm512_fmadd_ps(high_16(x), high_16(cos), high));
  };
  _mm512_storeu_si512(out, turned(a, _mm512_loadu_si512(cos), b, _mm512_loadu_si512(sin), -1.0f));
  _mm512_storeu_si512(out + half, turned(b, _mm512_loadu_si512(cos + half), a,
                                         _mm512_loadu_si512(sin + half), 1.0f));
}

#endif

// Rotates the first `angles` elements of one head; the rest is copied. `out` may be `x`.
template <typename T>
void rotate(const T* x, const T* cos, const T* sin, T* out, int64_t width, int64_t angles) {
  const int64_t half = angles / 2;
  int64_t done = 0;
#ifdef TANDEM_AMX
  if constexpr (std::is_same_v<T, at::BFloat16>) {
    for (; done + 32 <= half; done += 32) {
      rotate_32(x + done, cos + done, sin + done, out + done, half);
    }
  }
#endif
#pragma omp simd
  for (int64_t d = done; d < half; ++d) {
    const float a = widen(x[d]), b = widen(x[d + half]);
    out[d] = narrow<T>(a * widen(cos[d]) - b * widen(sin[d]));
    out[d + half] = narrow<T>(b * widen(cos[d + half]) + a * widen(sin[d + half]));
  }
  if (out != x) std::copy(x + angles, x + width, out + angles);
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
void gate_part(const T* x, const T* up, T* out, int64_t begin, int64_t end) {
#pragma omp simd
  for (int64_t d = begin; d < end; ++d) {
    const float value = widen(x[d]);
    const float gated = value / (1.0f + exponential(-Function::of(value)));
    out[d] = narrow<T>(widen(narrow<T>(gated)) * widen(up[d]));
  }
}

template <typename Function, typename T>
void gate_row(const T* x, const T* up, T* out, int64_t width) {
  gate_part<Function, T>(x, up, out, 0, width);
}

#ifdef TANDEM_AMX

// gate(x) * up, rounded after the gate and at the end. A division would take longer than all the
// rest; an estimate of 14 bits, improved once, has all of float32 but the last bits.
template <typename Function>
[[gnu::always_inline]] inline __m512i gate_32(__m512i x, __m512i up) {
  const __m512 one = _mm512_set1_ps(1.0f), minus_log2_e = _mm512_set1_ps(-1.44269504f);
  const __m512 two = _mm512_set1_ps(2.0f);
  const auto gated = [&](__m512 value) [[gnu::always_inline]] {
    const __m512 power = exp2_ps(_mm512_mul_ps(Function::of(value), minus_log2_e));
    const __m512 whole = _mm512_add_ps(one, power), guess = _mm512_rcp14_ps(whole);
    return _mm512_mul_ps(_mm512_mul_ps(value, guess), _mm512_fnmadd_ps(whole, guess, two));
  };
  const __m512i rounded = round_32(gated(low_16(x)), gated(high_16(x)));
  return round_32(_mm512_mul_ps(low_16(rounded), low_16(up)),
                  _mm512_mul_ps(high_16(rounded), high_16(up)));
}

template <typename Function>
void gate_row(const at::BFloat16* x, const at::BFloat16* up, at::BFloat16* out, int64_t width) {
  int64_t d = 0;
  for (; d + 32 <= width; d += 32) {
    _mm512_storeu_si512(out + d, gate_32<Function>(_mm512_loadu_si512(x + d),
                                                   _mm512_loadu_si512(up + d)));
  }
  gate_part<Function, at::BFloat16>(x, up, out, d, width);
}

// A row whose width is a multiple of 32, normalised; every 32 elements go `to_step` further.
inline void normalise_wide(const at::BFloat16* x, const at::BFloat16* weight, at::BFloat16* out,
                           int64_t width, int64_t to_step, float eps, bool shifted) {
  __m512 low = _mm512_setzero_ps(), high = _mm512_setzero_ps();
  for (int64_t d = 0; d < width; d += 32) {
    const __m512i line = _mm512_loadu_si512(x + d);
    low = _mm512_fmadd_ps(low_16(line), low_16(line), low);
    high = _mm512_fmadd_ps(high_16(line), high_16(line), high);
  }
  const float square = _mm512_reduce_add_ps(_mm512_add_ps(low, high));
  const __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(square / static_cast<float>(width) + eps));
  const __m512 one = _mm512_set1_ps(shifted ? 1.0f : 0.0f);
  for (int64_t d = 0; d < width; d += 32, out += to_step) {
    const __m512i line = _mm512_loadu_si512(x + d), w = _mm512_loadu_si512(weight + d);
    __m512 a = _mm512_mul_ps(low_16(line), factor), b = _mm512_mul_ps(high_16(line), factor);
    if (!shifted) {
      const __m512i rounded = round_32(a, b);
      a = low_16(rounded);
      b = high_16(rounded);
    }
    _mm512_storeu_si512(out, round_32(_mm512_mul_ps(a, _mm512_add_ps(one, low_16(w))),
                                      _mm512_mul_ps(b, _mm512_add_ps(one, high_16(w)))));
  }
}

#endif

template <typename T>
void normalise(const T* x, const T* weight, T* out, int64_t width, float eps, bool shifted) {
#ifdef TANDEM_AMX
  if constexpr (std::is_same_v<T, at::BFloat16>) {
    if (width % 32 == 0) return normalise_wide(x, weight, out, width, 32, eps, shifted);
  }
#endif
  scale_row(x, weight, out, width, norm_factor(x, width, eps), shifted);
}

}  // namespace tandem
