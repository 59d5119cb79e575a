// Vectors of the compiler's own kind, as wide as the processor's registers.
//
// The same source is AVX2, AVX-512, SSE or NEON. `TANDEM_VECTOR_BYTES` sets another width, which the
// compiler divides into what there is: so a test runs the code for wider registers.
#pragma once

#include <cstdint>

namespace tandem {

#if defined(TANDEM_VECTOR_BYTES)
constexpr int VECTOR_BYTES = TANDEM_VECTOR_BYTES;
#elif defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32;
#else
constexpr int VECTOR_BYTES = 16;
#endif
constexpr int64_t LANES = VECTOR_BYTES / 4;

using Vector = float __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
using Words = uint32_t __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));

}  // namespace tandem
