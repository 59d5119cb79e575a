// Products with frozen bfloat16 weights packed once for AMX.
//
// A weight [n, k] becomes panels of 32 output columns; a panel holds, for every 32 inputs, two
// tiles of 16 columns in the pair-interleaved order of AMX's right operand, so that a product reads
// it front to back. Up to 32 rows are bound by that stream: panels are prefetched and the rows are
// read as they lie. More rows are first packed into tiles too, and every panel, in slices that fit
// the first-level cache, serves many rows. Sums are in float32, rounded once.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <vector>

#include "tiles.h"

namespace tandem {
namespace {

#ifdef TANDEM_AMX

using at::BFloat16;

constexpr int64_t SIDE = 32;            // rows and columns of one block, inputs of one step
constexpr int64_t STEP = SIDE * SIDE;   // elements of a panel for one step
constexpr int64_t L1_STEPS = 8;         // of a panel that stay in the first-level cache: 16 KiB
constexpr int64_t L2_STEPS = 32;        // of the rows that stay in the second-level cache
constexpr int64_t MOST_BLOCKS = 16;     // row blocks of one work item: with L2_STEPS, 1 MiB
constexpr int64_t MOST_PANELS = 4;      // panels of one work item
constexpr int64_t STREAM_AHEAD = 4096;  // bytes; the hardware looks farther
constexpr int64_t STEP_LINES = STEP * 2 / 64;

// Where a block of 32 rows is: bytes between rows, elements between steps, to its lower half and
// to the next block.
struct Left {
  const BFloat16* at;
  int64_t row_bytes, step, lower, block;
};

// What to fetch during a product: `lines` cache lines a step from `at` on.
struct Ahead {
  const char* at;
  int64_t lines;
};

// block (+)= rows x panel over `steps`; TALL with both halves of the rows. Fetches go to the
// second-level cache: into the first they would push out the rows.
template <bool TALL>
void multiply(const BFloat16* rows, const Left& left, const BFloat16* panel, int64_t steps,
              bool fresh, float* block, Ahead& ahead) {
  constexpr int64_t lower = 16 * SIDE, bytes = SIDE * 4;
  if (fresh) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (TALL) {
      _tile_zero(2);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, block, bytes);
    _tile_loadd(1, block + 16, bytes);
    if constexpr (TALL) {
      _tile_loadd(2, block + lower, bytes);
      _tile_loadd(3, block + lower + 16, bytes);
    }
  }
  for (int64_t s = 0; s < steps; ++s, panel += STEP, rows += left.step) {
    for (const char* end = ahead.at + ahead.lines * 64; ahead.at < end; ahead.at += 64) {
      _mm_prefetch(ahead.at, _MM_HINT_T1);
    }
    _tile_loadd(4, rows, left.row_bytes);
    _tile_loadd(6, panel, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, panel + STEP / 2, 64);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (TALL) {
      _tile_loadd(5, rows + left.lower, left.row_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, block, bytes);
  _tile_stored(1, block + 16, bytes);
  if constexpr (TALL) {
    _tile_stored(2, block + lower, bytes);
    _tile_stored(3, block + lower + 16, bytes);
  }
}

// out = block + bias, rounded.
void write_block(const float* block, const float* bias, BFloat16* out, int64_t stride, int64_t rows,
                 int64_t columns) {
  const __m512 left = bias ? _mm512_loadu_ps(bias) : _mm512_setzero_ps();
  const __m512 right = bias ? _mm512_loadu_ps(bias + 16) : _mm512_setzero_ps();
  const __mmask32 real = columns == SIDE ? ~__mmask32{0} : (__mmask32{1} << columns) - 1;
  for (int64_t r = 0; r < rows; ++r) {
    const __m512 a = _mm512_add_ps(_mm512_loadu_ps(block + r * SIDE), left);
    const __m512 b = _mm512_add_ps(_mm512_loadu_ps(block + r * SIDE + 16), right);
    _mm512_mask_storeu_epi16(out + r * stride, real,
                             reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a)));
  }
}

// Copies rows into tiles, padded with zeros to whole blocks.
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

struct Product {
  Left left;
  const BFloat16* weight;
  const float* bias;
  BFloat16* out;
  int64_t rows, columns, steps, panels;

  int64_t blocks() const { return (rows + SIDE - 1) / SIDE; }
  int64_t columns_of(int64_t panel) const { return std::min(SIDE, columns - panel * SIDE); }
  // Claims the lines that `write` will fill, so that it does not wait for each of them.
  void fetch(int64_t b, int64_t panel) const {
    const int64_t end = std::min(SIDE, rows - b * SIDE);
    for (int64_t r = 0; r < end; ++r) {
      __builtin_prefetch(out + (b * SIDE + r) * columns + panel * SIDE, 1);
    }
  }
  void write(const float* block, int64_t b, int64_t panel) const {
    write_block(block, bias ? bias + panel * SIDE : nullptr,
                out + b * SIDE * columns + panel * SIDE, columns,
                std::min(SIDE, rows - b * SIDE), columns_of(panel));
  }
};

// At most 32 rows: one pass over the weights.
void stream(const Product& p) {
  constexpr int64_t panels_at_once = 2;
  for_each_item((p.panels + panels_at_once - 1) / panels_at_once, 1, [&](const auto& take) {
    TileConfig config;
    const bool tall = p.rows > 16;
    for (int t : {0, 1, 4}) config.rows[t] = static_cast<uint8_t>(std::min<int64_t>(p.rows, 16));
    if (tall) {
      for (int t : {2, 3, 5}) config.rows[t] = static_cast<uint8_t>(p.rows - 16);
    }
    const Tiles tiles(config);
    alignas(64) float block[STEP];
    for (int64_t item, end; take(item, end);) {
      const int64_t last = std::min(p.panels, (item + 1) * panels_at_once);
      for (int64_t panel = item * panels_at_once; panel < last; ++panel) {
        const BFloat16* w = p.weight + panel * p.steps * STEP;
        p.fetch(0, panel);
        Ahead ahead{reinterpret_cast<const char*>(w) + STREAM_AHEAD, STEP_LINES};
        const auto run = tall ? multiply<true> : multiply<false>;
        run(p.left.at, p.left, w, p.steps, true, block, ahead);
        p.write(block, 0, panel);
      }
    }
  });
}

// Many rows: a work item is up to MOST_PANELS panels against up to MOST_BLOCKS blocks of rows.
// While one panel is multiplied the next is fetched, a little at every step.
void compute(const Product& p) {
  const int64_t row_groups = (p.blocks() + MOST_BLOCKS - 1) / MOST_BLOCKS;
  const int64_t blocks = (p.blocks() + row_groups - 1) / row_groups;
  const int64_t panel_groups = (p.panels + MOST_PANELS - 1) / MOST_PANELS;
  const int64_t slices = (p.steps + L2_STEPS - 1) / L2_STEPS;
  const int64_t slice = (p.steps + slices - 1) / slices;
  for_each_item(row_groups * panel_groups, 1, [&](const auto& take) {
    const Tiles tiles(TileConfig{});
    std::vector<float> sums((slices > 1 ? MOST_PANELS : 1) * blocks * STEP);
    for (int64_t item, end; take(item, end);) {
      const int64_t first = item / panel_groups * blocks;
      const int64_t last = std::min(p.blocks(), first + blocks);
      const int64_t panel0 = item % panel_groups * MOST_PANELS;
      const int64_t panel1 = std::min(p.panels, panel0 + MOST_PANELS);
      for (int64_t s0 = 0; s0 < p.steps; s0 += slice) {
        const int64_t s1 = std::min(p.steps, s0 + slice);
        for (int64_t panel = panel0; panel < panel1; ++panel) {
          const int64_t next = panel + 1 < panel1 || s1 == p.steps ? (panel + 1) * p.steps + s0
                                                                   : panel0 * p.steps + s1;
          Ahead ahead{reinterpret_cast<const char*>(p.weight + next * STEP),
                      (STEP_LINES + last - first - 1) / (last - first)};
          float* of_panel = sums.data() + (slices > 1 ? panel - panel0 : 0) * blocks * STEP;
          for (int64_t s = s0; s < s1; s += L1_STEPS) {
            const BFloat16* w = p.weight + (panel * p.steps + s) * STEP;
            const int64_t steps = std::min(L1_STEPS, s1 - s);
            for (int64_t b = first; b < last; ++b) {
              const BFloat16* rows = p.left.at + b * p.left.block + s * p.left.step;
              float* block = of_panel + (b - first) * STEP;
              const bool done = s + steps == p.steps;
              if (done) p.fetch(b, panel);
              multiply<true>(rows, p.left, w, steps, s == 0, block, ahead);
              if (done) p.write(block, b, panel);
            }
          }
        }
      }
    }
  });
}

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
  const int64_t steps = packed.size(1), pairs = steps * SIDE / 2;
  at::Tensor out = at::empty({n, steps * SIDE}, packed.options());
  const int32_t* from = reinterpret_cast<const int32_t*>(packed.const_data_ptr<BFloat16>());
  int32_t* to = reinterpret_cast<int32_t*>(out.mutable_data_ptr<BFloat16>());
  at::parallel_for(0, n, 64, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int32_t* panel =
          from + row / SIDE * steps * STEP / 2 + row / 16 % 2 * STEP / 4 + row % 16;
      for (int64_t i = 0; i < pairs; ++i) {
        to[row * pairs + i] = panel[i / 16 * STEP / 2 + i % 16 * 16];
      }
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
  Product p{{rows.const_data_ptr<BFloat16>(), stride * 2, SIDE, 16 * stride, 0},
            packed.const_data_ptr<BFloat16>(),
            bias ? bias->const_data_ptr<float>() : nullptr,
            out.mutable_data_ptr<BFloat16>(),
            x.numel() / k,
            n,
            steps,
            packed.size(0)};
  if (p.rows == 0) return out;
  if (p.rows <= SIDE) {
    stream(p);
  } else {
    const at::Tensor tiles = pack_rows(rows, p.rows, stride, steps);
    p.left = {tiles.const_data_ptr<BFloat16>(), 64, STEP, STEP / 2, steps * STEP};
    compute(p);
  }
  return out;
}

bool amx_linear() { return amx_usable(); }

#else

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
