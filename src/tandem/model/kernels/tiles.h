// What the kernels share: AMX tiles and a few AVX-512 idioms, compiled in only where the processor
// has them. Every tile is full size (16 rows of 64 bytes), so one configuration serves all kernels.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <new>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__linux__)
#define TANDEM_AMX 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

// The body, a lambda without preprocessor lines, for each dtype that the kernels know.
#define TANDEM_DISPATCH(TYPE, NAME, ...)                                                        \
  AT_DISPATCH_SWITCH(TYPE, NAME,                                                                \
                     AT_DISPATCH_CASE(at::kFloat, __VA_ARGS__)                                  \
                         AT_DISPATCH_CASE(at::kBFloat16, __VA_ARGS__)                           \
                             AT_DISPATCH_CASE(at::kHalf, __VA_ARGS__))

namespace tandem {

// A bias or the weight of a norm, `count` long; none is right, too.
inline void check_vector(const std::optional<at::Tensor>& vector, int64_t count,
                         at::ScalarType dtype, const char* name) {
  TORCH_CHECK(!vector || (vector->is_contiguous() && vector->numel() == count &&
                          vector->scalar_type() == dtype),
              name, " is dense ", dtype, " [", count, "]");
}

// Floats that begin with a cache line: tiles that straddle lines take twice as long. Those of a new
// vector are not initialised.
template <typename T>
struct LineAllocator {
  using value_type = T;
  template <typename Other>
  struct rebind {
    using other = LineAllocator<Other>;
  };
  T* allocate(size_t n) {
    return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t{64}));
  }
  void deallocate(T* at, size_t) { ::operator delete(at, std::align_val_t{64}); }
  void construct(T* at) { ::new (at) T; }
  template <typename... From>
  void construct(T* at, From&&... from) {
    ::new (at) T(std::forward<From>(from)...);
  }
  bool operator==(const LineAllocator&) const = default;
};
using LineFloats = std::vector<float, LineAllocator<float>>;

// Runs f(begin, end) over [0, items) on all threads. Threads take `grain` items at a time from a
// shared counter, so that a core which the system slowed down does not hold back the other.
template <typename F>
void for_each_item(int64_t items, int64_t grain, const F& f) {
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), (items + grain - 1) / grain);
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    f([&](int64_t& begin, int64_t& end) {
      begin = next.fetch_add(grain, std::memory_order_relaxed);
      end = std::min(begin + grain, items);
      return begin < items;
    });
  });
}

[[gnu::always_inline]] inline float widen(float x) { return x; }
[[gnu::always_inline]] inline float widen(at::BFloat16 x) {
  return std::bit_cast<float>(uint32_t{x.x} << 16);
}
[[gnu::always_inline]] inline float widen(at::Half x) { return static_cast<float>(x); }

template <typename T>
[[gnu::always_inline]] inline T narrow(float x) {
  if constexpr (std::is_same_v<T, at::BFloat16>) {  // to nearest even, in a form that vectorises
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const uint32_t quiet_nan = 0x7fc0;
    return at::BFloat16(static_cast<uint16_t>(x == x ? rounded : quiet_nan),
                        at::BFloat16::from_bits());
  } else {
    return static_cast<T>(x);
  }
}

// e^x within about 2 ulp, in a form that vectorises; saturates where float32 ends.
[[gnu::always_inline]] inline float exponential(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float whole = std::rint(x * 1.44269504f);
  // The remainder is taken from x with log 2 in two parts, so that large x keep their accuracy.
  const float f = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  float p = 1.9875691e-4f;
  p = p * f + 1.3981999e-3f;
  p = p * f + 8.3334519e-3f;
  p = p * f + 4.1665795e-2f;
  p = p * f + 1.6666665e-1f;
  p = p * f + 5.0000001e-1f;
  p = p * f * f + f + 1.0f;
  return p * std::bit_cast<float>((static_cast<int32_t>(whole) + 127) << 23);
}

#ifdef TANDEM_AMX

// Linux saves tile registers only for processes that asked for it.
inline bool amx_usable() {
  static const bool granted = [] {
    constexpr long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
  }();
  return granted;
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Tiles configured for the lifetime of this object on this thread.
struct Tiles {
  explicit Tiles(const TileConfig& config) { _tile_loadconfig(&config); }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// Transposes a 16 x 16 matrix of 32-bit words held in r, in place.
inline void transpose_16x16(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
  }
}

// 2^x within 3e-6, for results that are rounded to bfloat16; saturates at 2^-126 and 2^127. The
// exponent is added as an integer: instructions that may yield denormal numbers are slow where they
// do.
inline __m512 exp2_ps(__m512 x) {
  x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-126.0f)), _mm512_set1_ps(127.0f));
  const __m512 magic = _mm512_set1_ps(12582912.0f);  // its last bit counts ones
  const __m512 shifted = _mm512_add_ps(x, magic);
  const __m512 f = _mm512_sub_ps(x, _mm512_sub_ps(shifted, magic));
  __m512 p = _mm512_set1_ps(9.57010173e-3f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.59178606e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.240247448f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.693121815f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.999999261f));
  const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), exponent));
}

#endif

}  // namespace tandem
