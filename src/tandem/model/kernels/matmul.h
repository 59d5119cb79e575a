// Products of bfloat16 rows with weights packed for AMX, with what is done to each finished block.
//
// A weight [n, k] is panels of 32 output columns; a panel holds, for every 32 inputs, two tiles of
// 16 columns in the pair-interleaved order of AMX's right operand, so that a product reads it front
// to back. Up to 32 rows are bound by that stream. More rows are tiles too, and every panel, in
// slices that fit the first-level cache, serves many of them. Sums are in float32, and their order
// does not depend on the number of rows.
#pragma once

#include <array>
#include <vector>

#include "rows.h"

namespace tandem {

#ifdef TANDEM_AMX

using at::BFloat16;

constexpr int64_t SIDE = 32;             // rows and columns of one block, inputs of one step
constexpr int64_t STEP = SIDE * SIDE;    // elements of a panel, or of a block of rows, for one step
constexpr int64_t STEP_LINES = STEP * 2 / 64;
constexpr int64_t L1_STEPS = 8;          // of a panel that stay in the first-level cache: 16 KiB
constexpr int64_t WHOLE_STEPS = 36;      // rows up to this long stay in the second-level cache
constexpr int64_t SLICE_STEPS = 16;      // of longer rows that do
constexpr int64_t MOST_BLOCKS = 16;      // row blocks of one work item: with WHOLE_STEPS, 1.1 MiB
constexpr int64_t MOST_PANELS = 4;       // panels of one work item, if their sums need not be kept
constexpr int64_t KEPT_SUMS = 256;       // blocks of sums kept between slices: 1 MiB
constexpr int64_t STREAM_AHEAD = 4096;   // bytes; the hardware looks farther

// Where a block of 32 rows is: bytes between rows, elements between steps, to its lower half and
// to the next block.
struct Left {
  const BFloat16* at;
  int64_t row_bytes, step, lower, block;

  static Left of_rows(const BFloat16* at, int64_t stride) {
    return {at, stride * 2, SIDE, 16 * stride, 0};
  }
  static Left of_tiles(const BFloat16* at, int64_t steps) {
    return {at, 64, STEP, STEP / 2, steps * STEP};
  }
};

// Where element 0 of `step` of row `row` is among tiles.
inline int64_t in_tiles(int64_t row, int64_t step, int64_t steps) {
  return (row / SIDE * steps + step) * STEP + row % SIDE * SIDE;
}

// Row `row` of a packed weight, `steps` * SIDE elements, to `to`.
inline void unpack_row(const BFloat16* packed, int64_t row, int64_t steps, BFloat16* to) {
  const int32_t* from = reinterpret_cast<const int32_t*>(packed) + row / SIDE * steps * STEP / 2 +
                        row / 16 % 2 * STEP / 4 + row % 16;
  int32_t* pairs = reinterpret_cast<int32_t*>(to);
  for (int64_t i = 0; i < steps * SIDE / 2; ++i) pairs[i] = from[i / 16 * STEP / 2 + i % 16 * 16];
}

// Rows `stride` elements apart, copied into tiles; zeros fill the last block.
at::Tensor pack_rows(const at::Tensor& x, int64_t rows, int64_t stride, int64_t steps);

// Rows times a weight of few inputs, added to the sums of some blocks of a larger product before
// they are written: row blocks [block, end) of `left`, `panels` of the output from `panel` on.
struct Update {
  Left left;
  const BFloat16* weight;
  int64_t steps, block, end, panel, panels;
};

// `pitch`: steps between the beginnings of two panels, more than `steps` for a part of the inputs.
struct Product {
  Left left;
  const BFloat16* weight;
  int64_t rows, steps, panels, pitch = steps;
  const std::vector<Update>* updates = nullptr;

  int64_t blocks() const { return (rows + SIDE - 1) / SIDE; }
};

// What to fetch during a product: `lines` cache lines a step from `at` on.
struct Ahead {
  const char* at;
  int64_t lines;

  void fetch() {
    for (const char* end = at + lines * 64; at < end; at += 64) _mm_prefetch(at, _MM_HINT_T1);
  }
};

// block (+)= rows x panel over `steps`; TALL with both halves of the rows. Fetches go to the
// second-level cache: into the first they would push out the rows. `meanwhile` is called at every
// step: what it does in vectors goes on beside the products of tiles.
template <bool TALL, typename Meanwhile>
[[gnu::always_inline]] inline void multiply(const BFloat16* rows, const Left& left,
                                            const BFloat16* panel, int64_t steps, bool fresh,
                                            float* block, Ahead& weights, Ahead more,
                                            Meanwhile& meanwhile) {
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
    weights.fetch();
    more.fetch();
    meanwhile();
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

template <bool TALL>
inline void add_updates(const Product& p, int64_t b, int64_t panel, float* block) {
  if (p.updates == nullptr) return;
  const auto nothing = [] {};
  for (const Update& u : *p.updates) {
    if (b < u.block || b >= u.end || panel < u.panel || panel >= u.panel + u.panels) continue;
    const BFloat16* w = u.weight + (panel - u.panel) * u.steps * STEP;
    Ahead ahead{reinterpret_cast<const char*>(w) + STREAM_AHEAD, STEP_LINES};
    multiply<TALL>(u.left.at + (b - u.block) * u.left.block, u.left, w, u.steps, false, block,
                   ahead, {nullptr, 0}, nothing);
  }
}

// At most 32 rows: one pass over the weights. Of the next panel the beginning is fetched: with
// several parts that panel comes a little later.
template <int PARTS, typename Out>
void stream(const Product& p, const Out& out) {
  constexpr int64_t units_at_once = 2 / PARTS;
  const int64_t units = p.panels / PARTS;
  for_each_item((units + units_at_once - 1) / units_at_once, 1, [&](const auto& take) {
    TileConfig config;
    const bool tall = p.rows > 16;
    for (int t : {0, 1, 4}) config.rows[t] = static_cast<uint8_t>(std::min<int64_t>(p.rows, 16));
    if (tall) {
      for (int t : {2, 3, 5}) config.rows[t] = static_cast<uint8_t>(p.rows - 16);
    }
    const Tiles tiles(config);
    const auto nothing = [] {};
    const auto update = tall ? add_updates<true> : add_updates<false>;
    alignas(64) float sums[PARTS][STEP];
    for (int64_t item, end; take(item, end);) {
      const int64_t last = std::min(units, (item + 1) * units_at_once);
      for (int64_t unit = item * units_at_once; unit < last; ++unit) {
        out.claim(0, unit);
        std::array<const float*, PARTS> blocks;
        for (int part = 0; part < PARTS; ++part) {
          const BFloat16* w = p.weight + (unit + part * units) * p.pitch * STEP;
          Ahead ahead{reinterpret_cast<const char*>(w) + STREAM_AHEAD, STEP_LINES};
          if (tall) {
            multiply<true>(p.left.at, p.left, w, p.steps, true, sums[part], ahead, {nullptr, 0},
                           nothing);
          } else {
            multiply<false>(p.left.at, p.left, w, p.steps, true, sums[part], ahead, {nullptr, 0},
                            nothing);
          }
          update(p, 0, unit + part * units, sums[part]);
          blocks[part] = sums[part];
        }
        for (int64_t r = 0; r < p.rows; ++r) out.write(blocks, 0, unit, r);
      }
    }
  });
}

// Finished blocks of one unit, written row by row while the next unit is multiplied: the tile unit
// and the vector units then work at the same time.
template <int PARTS, typename Out>
class Writing {
 public:
  Writing(const Out& out, int64_t rows) : out_(out), rows_(rows) {}

  // Row blocks [block, end) of `unit`, the parts `pitch` blocks apart, are finished at `sums`.
  void begin(const float* sums, int64_t pitch, int64_t block, int64_t end, int64_t unit) {
    finish();
    block_ = block;
    end_ = end;
    unit_ = unit;
    for (int part = 0; part < PARTS; ++part) blocks_[part] = sums + part * pitch * STEP;
    out_.claim(block_, unit_);
    enter();
  }
  // One row.
  [[gnu::always_inline]] void operator()() {
    if (row_ == last_) return;
    out_.write(blocks_, block_, unit_, row_);
    if (++row_ == last_) leave();
  }
  void finish() {
    while (row_ != last_) (*this)();
  }

 private:
  void enter() {
    row_ = 0;
    last_ = std::min(SIDE, rows_ - block_ * SIDE);
    if (block_ + 1 < end_) out_.claim(block_ + 1, unit_);
  }
  void leave() {
    if (++block_ == end_) return;
    for (const float*& block : blocks_) block += STEP;
    enter();
  }

  const Out& out_;
  int64_t rows_, block_ = 0, end_ = 0, unit_ = 0, row_ = 0, last_ = 0;
  std::array<const float*, PARTS> blocks_{};
};

// How many rows are divided into work items: a row group against a group of units, in slices of
// the inputs. Long rows are read again by every group of units, so these are as large as the sums
// that have to be kept allow; each thread gets several items where that is possible.
struct Division {
  int64_t blocks, row_groups, units, unit_groups, steps, slices;

  Division(const Product& p, int64_t parts) {
    const int64_t all = p.panels / parts, wanted = 2 * at::get_num_threads();
    row_groups = (p.blocks() + MOST_BLOCKS - 1) / MOST_BLOCKS;
    blocks = (p.blocks() + row_groups - 1) / row_groups;
    slices = p.steps <= WHOLE_STEPS ? 1 : (p.steps + SLICE_STEPS - 1) / SLICE_STEPS;
    steps = (p.steps + slices - 1) / slices;
    const int64_t most = slices == 1 ? MOST_PANELS / parts : KEPT_SUMS / parts / blocks;
    unit_groups = std::max((all + most - 1) / most, (wanted + row_groups - 1) / row_groups);
    units = (all + unit_groups - 1) / unit_groups;
    unit_groups = (all + units - 1) / units;
  }
};

// Many rows, as tiles. While one panel is multiplied the next one and the next slice of the rows
// are fetched, and the unit before is written, a little at every step.
template <int PARTS, typename Out>
void compute(const Product& p, const Out& out) {
  if (p.rows == 0 || p.panels == 0) return;
  const Division d(p, PARTS);
  const int64_t units = p.panels / PARTS;
  for_each_item(d.row_groups * d.unit_groups, 1, [&](const auto& take) {
    const Tiles tiles(TileConfig{});
    const int64_t kept = PARTS * d.blocks * STEP, sets = d.slices > 1 ? d.units : 2;
    LineFloats sums(sets * kept);
    Writing<PARTS, Out> writing(out, p.rows);
    int64_t set = 0;  // of the sums: the unit in progress
    for (int64_t item, end; take(item, end);) {
      const int64_t first = item / d.unit_groups * d.blocks;
      const int64_t last = std::min(p.blocks(), first + d.blocks);
      const int64_t unit0 = item % d.unit_groups * d.units;
      const int64_t panels = (std::min(units, unit0 + d.units) - unit0) * PARTS;
      const auto panel_of = [&](int64_t i) { return unit0 + i / PARTS + i % PARTS * units; };
      if (d.slices > 1) writing.finish();
      for (int64_t s0 = 0; s0 < p.steps; s0 += d.steps) {
        const int64_t s1 = std::min(p.steps, s0 + d.steps);
        const int64_t pieces = (s1 - s0 + L1_STEPS - 1) / L1_STEPS;
        const int64_t lines = (std::min(p.steps, s1 + d.steps) - s1) * STEP_LINES;
        const int64_t share = (lines + panels * pieces - 1) / (panels * pieces);
        for (int64_t i = 0; i < panels; ++i) {
          const int64_t next =
              i + 1 < panels ? panel_of(i + 1) * p.pitch + s0 : panel_of(0) * p.pitch + s1;
          Ahead weights{reinterpret_cast<const char*>(p.weight + next * STEP),
                        (STEP_LINES + last - first - 1) / (last - first)};
          if (d.slices > 1) set = i / PARTS;
          float* part = sums.data() + set * kept + i % PARTS * d.blocks * STEP;
          for (int64_t piece = 0; piece < pieces; ++piece) {
            const int64_t s = s0 + piece * L1_STEPS, steps = std::min(L1_STEPS, s1 - s);
            const BFloat16* w = p.weight + (panel_of(i) * p.pitch + s) * STEP;
            for (int64_t b = first; b < last; ++b) {
              const BFloat16* block_rows = p.left.at + b * p.left.block;
              const Ahead rows{reinterpret_cast<const char*>(block_rows + s1 * p.left.step) +
                                   (i * pieces + piece) * share * 64,
                               (share + steps - 1) / steps};
              float* block = part + (b - first) * STEP;
              multiply<true>(block_rows + s * p.left.step, p.left, w, steps, s == 0, block, weights,
                             rows, writing);
              if (s + steps == p.steps) add_updates<true>(p, b, panel_of(i), block);
            }
          }
          if (s1 < p.steps || i % PARTS < PARTS - 1) continue;
          writing.begin(sums.data() + set * kept, d.blocks, first, last, unit0 + i / PARTS);
          if (d.slices == 1) set = 1 - set;
        }
      }
    }
    writing.finish();
  });
}

template <int PARTS, typename Out>
void run_product(const Product& p, const Out& out) {
  p.rows <= SIDE ? stream<PARTS>(p, out) : compute<PARTS>(p, out);
}

// The 32 sums of one row of a block plus the bias, rounded to bfloat16.
inline __m512i round_row(const float* row, const float* bias) {
  __m512 a = _mm512_loadu_ps(row), b = _mm512_loadu_ps(row + 16);
  if (bias != nullptr) {
    a = _mm512_add_ps(a, _mm512_loadu_ps(bias));
    b = _mm512_add_ps(b, _mm512_loadu_ps(bias + 16));
  }
  return round_32(a, b);
}

// Finished blocks become rows [rows, columns]; with `residual`, a tensor alike, its sum with them.
struct ToRows {
  BFloat16* out;
  const BFloat16* residual;
  const float* bias;
  int64_t rows, columns;

  // Claims the lines that `write` will fill, so that it does not wait for each of them.
  void claim(int64_t b, int64_t panel) const {
    const int64_t end = std::min(SIDE, rows - b * SIDE), at = b * SIDE * columns + panel * SIDE;
    for (int64_t r = 0; r < end; ++r) {
      __builtin_prefetch(out + at + r * columns, 1);
      if (residual != nullptr) __builtin_prefetch(residual + at + r * columns, 0);
    }
  }
  [[gnu::always_inline]] void write(const std::array<const float*, 1>& block, int64_t b,
                                    int64_t panel, int64_t r) const {
    const int64_t width = std::min(SIDE, columns - panel * SIDE);
    const __mmask32 real = width == SIDE ? ~__mmask32{0} : (__mmask32{1} << width) - 1;
    const int64_t at = (b * SIDE + r) * columns + panel * SIDE;
    __m512i y = round_row(block[0] + r * SIDE, bias ? bias + panel * SIDE : nullptr);
    if (residual != nullptr) {
      const __m512i x = _mm512_maskz_loadu_epi16(real, residual + at);
      y = round_32(_mm512_add_ps(low_16(x), low_16(y)), _mm512_add_ps(high_16(x), high_16(y)));
    }
    _mm512_mask_storeu_epi16(out + at, real, y);
  }
};

#endif

}  // namespace tandem
