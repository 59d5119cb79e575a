// What the gradient of a decoder layer multiplies, on AMX: products with the low-rank update of an
// adapter added while a block of sums is still in registers' reach, the gate's gradient at the end of
// the product that feeds it, and the thin products that are the gradients of an adapter's matrices.
//
// Rows between two products stay tiles [blocks, steps, 32, 32] (matmul.h). Rows past the end are
// zero in every gradient, and finite elsewhere, so that sums over rows may take whole blocks.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "matmul.h"

namespace tandem {
namespace {

#ifdef TANDEM_AMX

using Optional = std::optional<at::Tensor>;

const BFloat16* data(const at::Tensor& x) { return x.const_data_ptr<BFloat16>(); }
const BFloat16* data(const Optional& x) { return x ? data(*x) : nullptr; }
const float* floats(const Optional& x) { return x ? x->const_data_ptr<float>() : nullptr; }

at::Tensor empty_tiles(const at::Tensor& like, int64_t blocks, int64_t steps) {
  return at::empty({blocks, steps, SIDE, SIDE}, like.options());
}

int64_t blocks_of(int64_t rows) { return (rows + SIDE - 1) / SIDE; }

void check_tiles(const at::Tensor& x) {
  TORCH_CHECK(amx_usable(), "the system does not grant AMX");
  TORCH_CHECK(x.dim() == 4 && x.is_contiguous() && x.size(2) == SIDE && x.size(3) == SIDE &&
                  x.scalar_type() == at::kBFloat16,
              "bfloat16 tiles [blocks, steps, 32, 32]");
}

// Finished blocks, times `scale` and plus `bias` by column, become tiles.
struct ToTiles {
  BFloat16* out;
  const float *bias, *scale;
  int64_t steps;

  void claim(int64_t b, int64_t panel) const {
    const char* at = reinterpret_cast<const char*>(out + (b * steps + panel) * STEP);
    for (int64_t i = 0; i < STEP_LINES; ++i) __builtin_prefetch(at + i * 64, 1);
  }
  void write(const std::array<const float*, 1>& block, int64_t b, int64_t panel, int64_t r) const {
    const __m512 one = _mm512_set1_ps(1.0f);
    const float *row = block[0] + r * SIDE, *by = scale ? scale + panel * SIDE : nullptr;
    __m512 low = _mm512_mul_ps(_mm512_loadu_ps(row), by ? _mm512_loadu_ps(by) : one);
    __m512 high = _mm512_mul_ps(_mm512_loadu_ps(row + 16), by ? _mm512_loadu_ps(by + 16) : one);
    if (bias != nullptr) {
      low = _mm512_add_ps(low, _mm512_loadu_ps(bias + panel * SIDE));
      high = _mm512_add_ps(high, _mm512_loadu_ps(bias + panel * SIDE + 16));
    }
    _mm512_store_si512(out + (b * steps + panel) * STEP + r * SIDE, round_32(low, high));
  }
};

// x w' and, if there is an adapter, low up'.
template <typename Out>
void run_updated(const at::Tensor& x, int64_t rows, const at::Tensor& weight, const Optional& low,
                 const Optional& up, const Out& out) {
  check_tiles(x);
  TORCH_CHECK(weight.size(1) == x.size(1), "the weight fits the tiles");
  TORCH_CHECK(low.has_value() == up.has_value() &&
                  (!low || (low->size(0) == x.size(0) && low->size(1) == up->size(1) &&
                            up->size(0) == weight.size(0))),
              "the update fits the product");
  Product p{Left::of_tiles(data(x), x.size(1)), data(weight), rows, x.size(1), weight.size(0)};
  std::vector<Update> updates;
  if (up) {
    const int64_t ranks = up->size(1);
    updates.push_back(
        {Left::of_tiles(data(low), ranks), data(up), ranks, 0, p.blocks(), 0, p.panels});
    p.updates = &updates;
  }
  compute<1>(p, out);
}

// x w' (+ low up') (+ bias) (+ residual) as rows [rows, n].
at::Tensor updated_rows(const at::Tensor& x, const at::Tensor& weight, const Optional& bias,
                        const Optional& low, const Optional& up, const Optional& residual,
                        int64_t rows, int64_t n) {
  TORCH_CHECK(blocks_of(rows) == x.size(0) && n <= weight.size(0) * SIDE &&
                  (!residual || (residual->is_contiguous() && residual->numel() == rows * n)),
              "rows and residual fit the tiles");
  at::Tensor out = at::empty({rows, n}, x.options());
  run_updated(x, rows, weight, low, up,
              ToRows{out.mutable_data_ptr<BFloat16>(), data(residual), floats(bias), rows, n});
  return out;
}

// The same as tiles, each column times `scale` before the bias; whole blocks.
at::Tensor updated_tiles(const at::Tensor& x, const at::Tensor& weight, const Optional& bias,
                         const Optional& low, const Optional& up, const Optional& scale) {
  at::Tensor out = empty_tiles(x, x.size(0), weight.size(0));
  run_updated(x, x.size(0) * SIDE, weight, low, up,
              ToTiles{out.mutable_data_ptr<BFloat16>(), floats(bias), floats(scale), weight.size(0)});
  return out;
}

// d/dx of y(x) in x / (1 + e^-y(x)); see `Silu` and `GeluTanh` of rows.h.
inline __m512 slope_of(Silu, __m512) { return _mm512_set1_ps(1.0f); }
inline __m512 slope_of(GeluTanh, __m512 x) {
  return _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(3 * 0.07135481628f),
                         _mm512_set1_ps(1.5957691216f));
}

struct Gated {
  __m512 gate, up, product;  // the gradients of both, and what the gate gave
};

template <typename Function>
[[gnu::always_inline]] inline Gated gate_gradient(__m512 x, __m512 up, __m512 gradient) {
  const __m512 one = _mm512_set1_ps(1.0f), minus_log2_e = _mm512_set1_ps(-1.44269504f);
  const __m512 power = exp2_ps(_mm512_mul_ps(Function::of(x), minus_log2_e));
  const __m512 sigmoid = _mm512_div_ps(one, _mm512_add_ps(one, power));
  const __m512 value = _mm512_mul_ps(x, sigmoid);
  const __m512 rest = _mm512_mul_ps(_mm512_sub_ps(one, sigmoid), slope_of(Function{}, x));
  const __m512 slope = _mm512_fmadd_ps(value, rest, sigmoid);
  return {_mm512_mul_ps(_mm512_mul_ps(gradient, up), slope), _mm512_mul_ps(gradient, value),
          _mm512_mul_ps(value, up)};
}

// A finished block is the gradient of act(gate) * up; those of gate and up, and the product itself,
// become tiles.
template <typename Function>
struct ToGateGradient {
  const BFloat16* joined;
  BFloat16 *gradient, *product;
  int64_t steps;  // of the product; the joined tiles have twice as many

  void claim(int64_t b, int64_t panel) const {
    for (const BFloat16* at : {gradient + (2 * b * steps + panel) * STEP,
                               gradient + ((2 * b + 1) * steps + panel) * STEP,
                               product + (b * steps + panel) * STEP}) {
      for (int64_t i = 0; i < STEP_LINES; ++i) __builtin_prefetch(at + i * SIDE, 1);
    }
  }
  void write(const std::array<const float*, 1>& block, int64_t b, int64_t panel, int64_t r) const {
    const int64_t gate = (2 * b * steps + panel) * STEP + r * SIDE, up = gate + steps * STEP;
    const __m512i g = _mm512_load_si512(joined + gate), u = _mm512_load_si512(joined + up);
    const float* row = block[0] + r * SIDE;
    const Gated a = gate_gradient<Function>(low_16(g), low_16(u), _mm512_loadu_ps(row));
    const Gated z = gate_gradient<Function>(high_16(g), high_16(u), _mm512_loadu_ps(row + 16));
    _mm512_store_si512(gradient + gate, round_32(a.gate, z.gate));
    _mm512_store_si512(gradient + up, round_32(a.up, z.up));
    _mm512_store_si512(product + (b * steps + panel) * STEP + r * SIDE,
                       round_32(a.product, z.product));
  }
};

// From what entered the gate (`joined` tiles: gate, then up) and the gradient of the inner layer's
// output: the gradient of `joined`, and act(gate) * up.
std::tuple<at::Tensor, at::Tensor> gate_gradients(const at::Tensor& x, const at::Tensor& weight,
                                                  const Optional& low, const Optional& up,
                                                  const at::Tensor& joined, bool gelu) {
  check_tiles(joined);
  const int64_t steps = weight.size(0), rows = x.size(0) * SIDE;
  TORCH_CHECK(joined.size(0) == x.size(0) && joined.size(1) == 2 * steps, "gate and up joined");
  at::Tensor gradient = at::empty_like(joined), product = empty_tiles(x, x.size(0), steps);
  BFloat16 *to = gradient.mutable_data_ptr<BFloat16>(), *kept = product.mutable_data_ptr<BFloat16>();
  if (gelu) {
    run_updated(x, rows, weight, low, up, ToGateGradient<GeluTanh>{data(joined), to, kept, steps});
  } else {
    run_updated(x, rows, weight, low, up, ToGateGradient<Silu>{data(joined), to, kept, steps});
  }
  return {gradient, product};
}

// act(gate) * up of joined tiles.
at::Tensor gated_tiles(const at::Tensor& joined, bool gelu) {
  check_tiles(joined);
  const int64_t steps = joined.size(1) / 2;
  at::Tensor out = empty_tiles(joined, joined.size(0), steps);
  const BFloat16* from = data(joined);
  BFloat16* to = out.mutable_data_ptr<BFloat16>();
  at::parallel_for(0, joined.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const BFloat16 *gate = from + 2 * b * steps * STEP, *up = gate + steps * STEP;
      BFloat16* row = to + b * steps * STEP;
      gelu ? gate_row<GeluTanh>(gate, up, row, steps * STEP)
           : gate_row<Silu>(gate, up, row, steps * STEP);
    }
  });
  return out;
}

at::Tensor row_tiles(const at::Tensor& x) {
  TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1 && x.size(1) % SIDE == 0 &&
                  x.scalar_type() == at::kBFloat16,
              "bfloat16 rows of a width that is a multiple of ", SIDE);
  const int64_t steps = x.size(1) / SIDE;
  return pack_rows(x, x.size(0), x.stride(0), steps).view({-1, steps, SIDE, SIDE});
}

// Normalised rows of a dense x [rows, k], as tiles.
at::Tensor norm_tiles(const at::Tensor& x, const at::Tensor& weight, double eps, bool shifted) {
  const int64_t rows = x.size(0), width = x.size(1), steps = width / SIDE;
  TORCH_CHECK(x.is_contiguous() && width % SIDE == 0 && weight.numel() == width, "dense rows");
  at::Tensor out = empty_tiles(x, blocks_of(rows), steps);
  BFloat16* to = out.mutable_data_ptr<BFloat16>();
  at::parallel_for(0, out.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      if (rows - b * SIDE < SIDE) std::fill_n(to + b * steps * STEP, steps * STEP, BFloat16(0));
      for (int64_t r = b * SIDE; r < std::min(rows, (b + 1) * SIDE); ++r) {
        normalise_wide(data(x) + r * width, data(weight), to + in_tiles(r, 0, steps), width, STEP,
                       static_cast<float>(eps), shifted);
      }
    }
  });
  return out;
}

// Tiles [blocks, steps, 32, 32] with each 32 x 32 block turned: element [r][t] of block (s, b).
std::vector<BFloat16> turned(const at::Tensor& x) {
  const int64_t blocks = x.size(0), steps = x.size(1);
  std::vector<BFloat16> out(x.numel());
  for (int64_t b = 0; b < blocks; ++b) {
    for (int64_t s = 0; s < steps; ++s) {
      const BFloat16* from = data(x) + (b * steps + s) * STEP;
      BFloat16* to = out.data() + (s * blocks + b) * STEP;
      for (int64_t t = 0; t < SIDE; ++t) {
        for (int64_t r = 0; r < SIDE; ++r) to[r * SIDE + t] = from[t * SIDE + r];
      }
    }
  }
  return out;
}

// thin' wide, summed over all rows of both, as float32 [columns of thin, columns of wide].
at::Tensor thin_product(const at::Tensor& thin, const at::Tensor& wide) {
  check_tiles(thin);
  check_tiles(wide);
  const int64_t blocks = wide.size(0), steps = wide.size(1), parts = thin.size(1);
  TORCH_CHECK(thin.size(0) == blocks, "as many rows on both sides");
  const int64_t columns = steps * SIDE;
  at::Tensor out = at::empty({parts * SIDE, columns}, thin.options().dtype(at::kFloat));
  float* to = out.mutable_data_ptr<float>();
  const std::vector<BFloat16> left = turned(thin);
  alignas(64) static constexpr auto order = [] {
    std::array<int16_t, 64> index{};
    for (int i = 0; i < 64; ++i) index[i] = static_cast<int16_t>(i / 2 + (i % 2) * 32);
    return index;
  }();
  for_each_item(steps, 4, [&](const auto& take) {
    const Tiles tiles(TileConfig{});
    const __m512i low = _mm512_load_si512(order.data()), high = _mm512_load_si512(&order[32]);
    alignas(64) BFloat16 pairs[STEP];  // pairs of rows interleaved: columns 0-15, then 16-31
    for (int64_t item, end; take(item, end);) {
      for (int64_t part = 0; part < parts; ++part) {
        for (int64_t s = item; s < end; ++s) {
          _tile_zero(0);
          _tile_zero(1);
          _tile_zero(2);
          _tile_zero(3);
          for (int64_t b = 0; b < blocks; ++b) {
            const BFloat16* from = data(wide) + (b * steps + s) * STEP;
            for (int64_t i = 0; i < 16; ++i) {
              const __m512i x = _mm512_load_si512(from + 2 * i * SIDE);
              const __m512i y = _mm512_load_si512(from + (2 * i + 1) * SIDE);
              _mm512_store_si512(pairs + i * SIDE, _mm512_permutex2var_epi16(x, low, y));
              _mm512_store_si512(pairs + STEP / 2 + i * SIDE, _mm512_permutex2var_epi16(x, high, y));
            }
            const BFloat16* l = left.data() + (part * blocks + b) * STEP;
            _tile_loadd(4, l, 64);
            _tile_loadd(5, l + STEP / 2, 64);
            _tile_loadd(6, pairs, 64);
            _tile_loadd(7, pairs + STEP / 2, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
          }
          float* at = to + part * SIDE * columns + s * SIDE;
          _tile_stored(0, at, columns * 4);
          _tile_stored(1, at + 16, columns * 4);
          _tile_stored(2, at + 16 * columns, columns * 4);
          _tile_stored(3, at + 16 * columns + 16, columns * 4);
        }
      }
    }
  });
  return out;
}

#endif

TORCH_LIBRARY_FRAGMENT(tandem, m) {
#ifdef TANDEM_AMX
  m.def(
      "updated_rows(Tensor x, Tensor weight, Tensor? bias, Tensor? low, Tensor? up, "
      "Tensor? residual, int rows, int n) -> Tensor");
  m.def(
      "updated_tiles(Tensor x, Tensor weight, Tensor? bias, Tensor? low, Tensor? up, "
      "Tensor? scale) -> Tensor");
  m.def(
      "gate_gradients(Tensor x, Tensor weight, Tensor? low, Tensor? up, Tensor joined, bool gelu) "
      "-> (Tensor, Tensor)");
  m.def("gated_tiles(Tensor joined, bool gelu) -> Tensor");
  m.def("row_tiles(Tensor x) -> Tensor");
  m.def("norm_tiles(Tensor x, Tensor weight, float eps, bool shifted) -> Tensor");
  m.def("thin_product(Tensor thin, Tensor wide) -> Tensor");
#endif
}

#ifdef TANDEM_AMX
TORCH_LIBRARY_IMPL(tandem, CPU, m) {
  m.impl("updated_rows", updated_rows);
  m.impl("updated_tiles", updated_tiles);
  m.impl("gate_gradients", gate_gradients);
  m.impl("gated_tiles", gated_tiles);
  m.impl("row_tiles", row_tiles);
  m.impl("norm_tiles", norm_tiles);
  m.impl("thin_product", thin_product);
}
#endif

}  // namespace
}  // namespace tandem
