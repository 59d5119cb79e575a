// Products of rows with weights packed for vector registers, for processors without AMX.
//
// A weight [n, k] is panels of COLUMNS output columns; a panel holds, for every two inputs, those of
// each column side by side, so that a product reads it front to back. bfloat16 stays bfloat16 in
// memory: a word of 32 bits is two inputs of one column, and a shift or a mask makes a float32 of
// either. Products and sums are in float32, so nothing is lost. float32 weights have the same
// order. Rows are copied into groups of a few that fit the registers. The instruction for pairs of
// bfloat16 (AVX-512) also sums in float32, but takes denormal numbers as zero.
#pragma once

#include <algorithm>
#include <array>
#include <optional>

#include "tiles.h"
#include "vectors.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace tandem {

constexpr int64_t COLUMNS = 2 * LANES;  // of a panel
#if defined(__aarch64__)
constexpr int64_t MOST_HEIGHT = 12;
#else
constexpr int64_t MOST_HEIGHT = VECTOR_BYTES == 64 ? 12 : 6;  // rows whose sums fit the registers
#endif
constexpr int64_t FEW_HEIGHT = 3;         // rows for which two panels are multiplied at once
constexpr int64_t CACHED_BYTES = 12288;   // of a panel that stay in the first-level cache
constexpr int64_t CACHED_ROWS = 96;       // whose inputs stay in the second-level cache
constexpr int64_t PANELS_AT_ONCE = 8;     // of one work item
constexpr int64_t PANEL_AHEAD = 2048;     // bytes that are fetched before they are read

// Whether `packed` is a weight [n, k] in panels.
inline bool is_panels(const at::Tensor& packed, int64_t n, int64_t k) {
  const at::ScalarType dtype = packed.scalar_type();
  return (dtype == at::kFloat || dtype == at::kBFloat16) && packed.dim() == 3 &&
         packed.is_contiguous() && n >= 0 && k >= 0 && packed.size(0) == (n + COLUMNS - 1) / COLUMNS &&
         packed.size(1) == (k + 1) / 2 && packed.size(2) == 2 * COLUMNS;
}

[[gnu::always_inline]] inline Vector first_of(Words pairs) {
  return reinterpret_cast<Vector>(pairs << 16);
}
[[gnu::always_inline]] inline Vector second_of(Words pairs) {
  return reinterpret_cast<Vector>(pairs & 0xffff0000u);
}

// How a panel is stored: two inputs of LANES columns from `at` on.
struct Halves {
  using Element = uint32_t;
  static constexpr int64_t pair = COLUMNS;  // elements for two inputs
  [[gnu::always_inline]] static Vector first(const uint32_t* at) {
    return first_of(*reinterpret_cast<const Words*>(at));
  }
  [[gnu::always_inline]] static Vector second(const uint32_t* at) {
    return second_of(*reinterpret_cast<const Words*>(at));
  }
};

struct Singles {
  using Element = float;
  static constexpr int64_t pair = 2 * COLUMNS;
  [[gnu::always_inline]] static Vector first(const float* at) {
    return *reinterpret_cast<const Vector*>(at);
  }
  [[gnu::always_inline]] static Vector second(const float* at) { return first(at + COLUMNS); }
};

// How rows are stored: as float32 [inputs][rows], or as bfloat16 [pairs of inputs][rows].
struct FloatRows {
  using Element = float;
  static constexpr int64_t per_pair = 2;
};

struct PairRows {
  using Element = uint32_t;
  static constexpr int64_t per_pair = 1;
};

#if defined(__AVX512BF16__) && !defined(TANDEM_VECTOR_BYTES)
constexpr bool PAIR_PRODUCTS = true;
[[gnu::always_inline]] inline Vector pair_product(Vector sum, Words w, uint32_t x) {
  const __m512i right = reinterpret_cast<__m512i>(w);
  return reinterpret_cast<Vector>(_mm512_dpbf16_ps(
      reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(right),
      reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(x)))));
}
#else
#if defined(TANDEM_PAIR_PRODUCTS)
constexpr bool PAIR_PRODUCTS = true;
#else
constexpr bool PAIR_PRODUCTS = false;
#endif
// What the instruction for two products does, for processors without it.
[[gnu::always_inline]] inline Vector pair_product(Vector sum, Words w, uint32_t x) {
  const float low = std::bit_cast<float>(x << 16), high = std::bit_cast<float>(x & 0xffff0000u);
  return sum + low * first_of(w) + high * second_of(w);
}
#endif

// What to fetch for every two inputs: `step` bytes from `at` on. A panel that other groups of rows
// read again is fetched into the second-level cache, in equal parts by each of them.
struct PanelAhead {
  const char* at;
  int64_t step;
  bool near;

  [[gnu::always_inline]] void fetch() {
    for (int64_t line = 0; line < step; line += 64) {
      near ? __builtin_prefetch(at + line) : __builtin_prefetch(at + line, 0, 2);
    }
    at += step;
  }
};

// For each of PANELS, sums [HEIGHT][COLUMNS] (+)= a group of rows x the panel at w[p], over `pairs`
// of inputs. A row and column have one sum, in the order of the inputs: a row's result does not
// depend on the number of rows. Since an addition waits for the one before, few rows are multiplied
// with two panels at once.
template <typename Stored, typename Rows, int HEIGHT, int PANELS>
void multiply_group(const typename Rows::Element* x, const typename Stored::Element* const* panels,
                    int64_t pairs, float* const* sums, bool fresh, PanelAhead ahead) {
  Vector a[PANELS][HEIGHT][2];
  const typename Stored::Element* w[PANELS];
#pragma GCC unroll 2
  for (int p = 0; p < PANELS; ++p) {
    w[p] = panels[p];
    const Vector* from = reinterpret_cast<const Vector*>(sums[p]);
#pragma GCC unroll 12
    for (int r = 0; r < HEIGHT; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) a[p][r][v] = fresh ? Vector{} : from[2 * r + v];
    }
  }
  for (int64_t i = 0; i < pairs; ++i, x += HEIGHT * Rows::per_pair) {
    ahead.fetch();
#pragma GCC unroll 2
    for (int p = 0; p < PANELS; ++p) {
      if constexpr (PANELS > 1) {
        constexpr int64_t bytes = Stored::pair * sizeof(*w[p]);
        const char* own = reinterpret_cast<const char*>(w[p]) + PANEL_AHEAD;
#pragma GCC unroll 4
        for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(own + line);
      }
      if constexpr (std::is_same_v<Rows, FloatRows>) {
        Vector right[2] = {Stored::first(w[p]), Stored::first(w[p] + LANES)};
#pragma GCC unroll 12
        for (int r = 0; r < HEIGHT; ++r) {
          a[p][r][0] += x[r] * right[0];
          a[p][r][1] += x[r] * right[1];
        }
        right[0] = Stored::second(w[p]);
        right[1] = Stored::second(w[p] + LANES);
#pragma GCC unroll 12
        for (int r = 0; r < HEIGHT; ++r) {
          a[p][r][0] += x[HEIGHT + r] * right[0];
          a[p][r][1] += x[HEIGHT + r] * right[1];
        }
      } else {
        const Words* right = reinterpret_cast<const Words*>(w[p]);
#pragma GCC unroll 12
        for (int r = 0; r < HEIGHT; ++r) {
          a[p][r][0] = pair_product(a[p][r][0], right[0], x[r]);
          a[p][r][1] = pair_product(a[p][r][1], right[1], x[r]);
        }
      }
      w[p] += Stored::pair;
    }
  }
#pragma GCC unroll 2
  for (int p = 0; p < PANELS; ++p) {
    Vector* to = reinterpret_cast<Vector*>(sums[p]);
#pragma GCC unroll 12
    for (int r = 0; r < HEIGHT; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) to[2 * r + v] = a[p][r][v];
    }
  }
}

template <typename Stored, typename Rows>
using MultiplyGroup = void (*)(const typename Rows::Element*, const typename Stored::Element* const*,
                               int64_t, float* const*, bool, PanelAhead);

template <typename Stored, typename Rows, int PANELS, size_t... I>
constexpr MultiplyGroup<Stored, Rows> group_product(int64_t height, std::index_sequence<I...>) {
  constexpr MultiplyGroup<Stored, Rows> all[] = {multiply_group<Stored, Rows, I + 1, PANELS>...};
  return all[height - 1];
}

// Rows divided into groups of at most MOST_HEIGHT: the first `tall` have `height` rows, the others
// one less, so that no row is computed in vain.
struct Groups {
  int64_t rows, inputs, count, height, tall, pairs;

  Groups(int64_t rows, int64_t inputs)
      : rows(rows),
        inputs(inputs),
        count((rows + MOST_HEIGHT - 1) / MOST_HEIGHT),
        height(count > 0 ? (rows + count - 1) / count : 0),
        tall(rows - count * (height - 1)),
        pairs((inputs + 1) / 2) {}
  int64_t height_of(int64_t group) const { return group < tall ? height : height - 1; }
  int64_t begin(int64_t group) const {  // its first row
    return group * height - std::max<int64_t>(0, group - tall);
  }
  int64_t of(int64_t row) const {
    const int64_t rest = row - tall * height;
    return rest < 0 ? row / height : tall + rest / (height - 1);
  }
};

// Rows in groups: float32, or pairs of bfloat16.
template <typename Rows>
class GroupedRows {
 public:
  explicit GroupedRows(const Groups& groups)
      : groups(groups),
        values_(groups.count * groups.pairs * groups.height * Rows::per_pair) {
    if (groups.inputs % 2 == 0) return;
    // What is missing is zero: anything else could be a slow number.
    for (int64_t g = 0; g < groups.count; ++g) {
      const int64_t size = groups.height_of(g) * Rows::per_pair;
      std::fill_n(group(g) + (groups.pairs - 1) * size, size, typename Rows::Element{});
    }
  }
  typename Rows::Element* group(int64_t g) { return values_.data() + g * size(); }
  const typename Rows::Element* group(int64_t g) const { return values_.data() + g * size(); }
  int64_t size() const { return groups.pairs * groups.height * Rows::per_pair; }

  // Inputs begin:end of row `r`, from `x`; `begin` is even.
  template <typename T>
  void put(int64_t r, int64_t begin, int64_t end, const T* x) {
    const int64_t g = groups.of(r), height = groups.height_of(g), place = r - groups.begin(g);
    if constexpr (std::is_same_v<Rows, FloatRows>) {
      float* to = group(g) + place;
      for (int64_t i = begin; i < end; ++i) to[i * height] = widen(x[i - begin]);
    } else {
      uint32_t* to = group(g) + place + begin / 2 * height;
      const int64_t count = end - begin;
      for (int64_t i = 0; i < count / 2; ++i) {
        to[i * height] = x[2 * i].x | static_cast<uint32_t>(x[2 * i + 1].x) << 16;
      }
      if (count % 2 == 1) to[count / 2 * height] = x[count - 1].x;
    }
  }

  const Groups groups;

 private:
  std::vector<typename Rows::Element, LineAllocator<typename Rows::Element>> values_;
};

// All rows [rows, inputs], `stride` elements apart.
template <typename Rows, typename T>
GroupedRows<Rows> grouped(const T* x, int64_t rows, int64_t inputs, int64_t stride) {
  GroupedRows<Rows> out(Groups(rows, inputs));
  const Groups& groups = out.groups;
  at::parallel_for(0, groups.count, std::max<int64_t>(1, 16384 / (inputs * MOST_HEIGHT)),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t r = groups.begin(begin); r < groups.begin(end); ++r) {
                       out.put(r, 0, inputs, x + r * stride);
                     }
                   });
  return out;
}

// Sums of `groups` from `first` on, with PARTS panels of one unit, given to `out` row by row.
template <int PARTS, typename Out>
void write_unit(const Out& out, const Groups& groups, int64_t first, int64_t last, int64_t unit,
                const float* sums) {
  const int64_t part = (last - first) * groups.height * COLUMNS;
  for (int64_t g = first; g < last; ++g) {
    for (int64_t r = 0; r < groups.height_of(g); ++r) {
      std::array<const float*, PARTS> rows;
      for (int p = 0; p < PARTS; ++p) {
        rows[p] = sums + p * part + ((g - first) * groups.height + r) * COLUMNS;
      }
      out.write(rows, groups.begin(g) + r, unit);
    }
  }
}

// A range of groups; `end` -1: to the last.
struct GroupRange {
  int64_t begin = 0, end = -1;
};

// How a product is divided into work items: a block of groups of rows against a set of units, with a
// slice of the pairs of inputs at a time. The last ones may have less.
template <typename Stored>
struct PanelDivision {
  int64_t blocks, block_groups, set_units, sets, slice_pairs;

  PanelDivision(const Groups& groups, int64_t count, int64_t units, int64_t parts) {
    constexpr int64_t pair_bytes = Stored::pair * sizeof(typename Stored::Element);
    const int64_t at_once = std::max<int64_t>(1, CACHED_ROWS / groups.height);
    blocks = (count + at_once - 1) / at_once;
    block_groups = (count + blocks - 1) / blocks;
    const int64_t share = units * blocks / (4 * at::get_num_threads());
    set_units = std::clamp<int64_t>(share, 1, PANELS_AT_ONCE / parts);
    sets = (units + set_units - 1) / set_units;
    // A single group reads every panel once, whole.
    const int64_t whole = count == 1 ? groups.pairs : CACHED_BYTES / pair_bytes;
    const int64_t slices = (groups.pairs + whole - 1) / whole;
    slice_pairs = (groups.pairs + slices - 1) / slices;
  }
};

// The product of rows with `panels` panels at `weight`. A unit is PARTS panels, `panels` / PARTS
// apart, which `out` takes together.
template <typename Stored, int PARTS, typename Rows, typename Out>
void run_panels(const GroupedRows<Rows>& rows, const typename Stored::Element* weight,
                int64_t panels, const Out& out, GroupRange range = {}) {
  constexpr auto heights = std::make_index_sequence<MOST_HEIGHT>();
  constexpr auto few_heights = std::make_index_sequence<FEW_HEIGHT>();
  constexpr int64_t pair_bytes = Stored::pair * sizeof(typename Stored::Element);
  const Groups& groups = rows.groups;
  const int64_t end_group = range.end < 0 ? groups.count : range.end;
  const int64_t count = end_group - range.begin, units = panels / PARTS;
  if (count == 0 || panels == 0) return;
  const bool few = count == 1 && groups.height <= FEW_HEIGHT;
  const auto tall = group_product<Stored, Rows, 1>(groups.height, heights);
  const auto low = group_product<Stored, Rows, 1>(std::max<int64_t>(1, groups.height - 1), heights);
  const auto two = group_product<Stored, Rows, 2>(few ? groups.height : 1, few_heights);
  const PanelDivision<Stored> d(groups, count, units, PARTS);
  for_each_item(d.blocks * d.sets, 1, [&](const auto& take) {
    LineFloats sums(d.set_units * PARTS * d.block_groups * groups.height * COLUMNS);
    for (int64_t item, end; take(item, end);) {
      const int64_t first = range.begin + item / d.sets * d.block_groups;
      const int64_t last = std::min(end_group, first + d.block_groups);
      const int64_t unit0 = item % d.sets * d.set_units, unit1 = std::min(units, unit0 + d.set_units);
      const int64_t size = (last - first) * groups.height * COLUMNS, all = (unit1 - unit0) * PARTS;
      const auto panel_at = [&](int64_t i, int64_t pair) {
        return weight + ((unit0 + i / PARTS + i % PARTS * units) * groups.pairs + pair) * Stored::pair;
      };
      for (int64_t p0 = 0; p0 < groups.pairs; p0 += d.slice_pairs) {
        const int64_t pairs = std::min(d.slice_pairs, groups.pairs - p0);
        const bool finished = p0 + d.slice_pairs >= groups.pairs;
        for (int64_t i = 0; i < all;) {
          const int64_t at_once = few && i + 1 < all ? 2 : 1;
          const typename Stored::Element* w[2] = {panel_at(i, p0), panel_at(i + 1, p0)};
          const auto* next = i + 1 < all ? w[1] : panel_at(0, p0 + pairs);
          const int64_t step = count == 1 ? pair_bytes : pair_bytes / (last - first);
          for (int64_t g = first; g < last; ++g) {
            const auto one = g < groups.tall ? tall : low;
            const auto* x = rows.group(g) + p0 * groups.height_of(g) * Rows::per_pair;
            float* at = sums.data() + i * size + (g - first) * groups.height * COLUMNS;
            float* to[2] = {at, at + size};
            if (at_once == 2) {
              two(x, w, pairs, to, p0 == 0, {nullptr, 0, true});
            } else if (count == 1) {
              one(x, w, pairs, to, p0 == 0,
                  {reinterpret_cast<const char*>(w[0]) + PANEL_AHEAD, step, true});
            } else {
              one(x, w, pairs, to, p0 == 0,
                  {reinterpret_cast<const char*>(next) + (g - first) * step * pairs, step, false});
            }
          }
          for (int64_t end = i + at_once; i < end; ++i) {
            if (!finished || i % PARTS < PARTS - 1) continue;
            write_unit<PARTS>(out, groups, first, last, unit0 + i / PARTS,
                              sums.data() + (i - (PARTS - 1)) * size);
          }
        }
      }
    }
  });
}

// Finished sums become rows [rows, columns]; with `residual`, a tensor alike, their sum.
template <typename T>
struct PanelsToRows {
  T* out;
  const T* residual;
  const float* bias;
  int64_t columns;

  void write(const std::array<const float*, 1>& sums, int64_t r, int64_t panel) const {
    const int64_t c0 = panel * COLUMNS, width = std::min(COLUMNS, columns - c0);
    if (width == COLUMNS) return put(sums[0], r * columns + c0, c0, COLUMNS);
    put(sums[0], r * columns + c0, c0, width);
  }
  [[gnu::always_inline]] void put(const float* sums, int64_t at, int64_t c0, int64_t width) const {
#pragma omp simd
    for (int64_t c = 0; c < width; ++c) {
      const float y = bias != nullptr ? sums[c] + bias[c0 + c] : sums[c];
      out[at + c] = residual != nullptr ? narrow<T>(widen(residual[at + c]) + widen(narrow<T>(y)))
                                        : narrow<T>(y);
    }
  }
};

}  // namespace tandem
