// The two halves of a decoder layer as one call each, with weights in panels: for float32 and
// bfloat16 rows on processors without AMX.
//
// As in layer.cpp, what lies between two products stays in the form in which the next one reads it,
// except where an adapter changes it: its update is added to rows before the next step.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/index_select.h>
#include <torch/library.h>

#include "attention.h"
#include "heads.h"
#include "panels.h"

namespace tandem {
namespace {

using Optional = std::optional<at::Tensor>;

constexpr int64_t GRAIN = 16384;  // elements worth a thread

template <typename T>
const T* data(const Optional& x) {
  return x ? x->const_data_ptr<T>() : nullptr;
}
const float* bias_of(const Optional& x) { return data<float>(x); }

// How rows of T are stored for a product.
template <typename T>
using RowsOf =
    std::conditional_t<std::is_same_v<T, at::BFloat16> && PAIR_PRODUCTS, PairRows, FloatRows>;

// The product of rows with a packed weight of either dtype.
template <int PARTS, typename Rows, typename Out>
void multiply_with(const GroupedRows<Rows>& rows, const at::Tensor& packed, const Out& out,
                   GroupRange range = {}) {
  TORCH_CHECK(packed.dim() == 3 &&
                  is_panels(packed, packed.size(0) * COLUMNS, 2 * rows.groups.pairs),
              "the weight fits the rows");
  if (packed.scalar_type() == at::kBFloat16) {
    run_panels<Halves, PARTS>(rows, static_cast<const uint32_t*>(packed.const_data_ptr()),
                              packed.size(0), out, range);
  } else if constexpr (std::is_same_v<Rows, FloatRows>) {
    run_panels<Singles, PARTS>(rows, packed.const_data_ptr<float>(), packed.size(0), out, range);
  } else {
    TORCH_CHECK(false, "bfloat16 rows have bfloat16 weights");
  }
}

// Calls f(row) for all rows, on all threads; a thread takes whole groups.
template <typename F>
void for_each_grouped(const Groups& groups, const F& f) {
  const int64_t grain = std::max<int64_t>(1, GRAIN / (groups.inputs * groups.height));
  at::parallel_for(0, groups.count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = groups.begin(begin); r < groups.begin(end); ++r) f(r);
  });
}

struct Norm {
  const at::Tensor& weight;
  float eps;
  bool shifted;
};

template <typename T>
GroupedRows<RowsOf<T>> normalised(const at::Tensor& x, const Norm& norm, int64_t rows) {
  const int64_t width = x.size(-1);
  GroupedRows<RowsOf<T>> out(Groups(rows, width));
  const T *from = x.const_data_ptr<T>(), *weight = norm.weight.const_data_ptr<T>();
  for_each_grouped(out.groups, [&](int64_t r) {
    thread_local std::vector<T> row;
    row.resize(width);
    normalise(from + r * width, weight, row.data(), width, norm.eps, norm.shifted);
    out.put(r, 0, width, row.data());
  });
  return out;
}

// Adds finished sums to rows `columns` wide, of which `width` from `offset` on are the product's.
template <typename T>
struct AddToRows {
  T* out;
  int64_t columns, offset, width;

  void write(const std::array<const float*, 1>& sums, int64_t r, int64_t panel) const {
    const int64_t c0 = panel * COLUMNS, end = std::min(COLUMNS, width - c0);
    T* to = out + r * columns + offset + c0;
    for (int64_t c = 0; c < end; ++c) to[c] = narrow<T>(widen(to[c]) + sums[0][c]);
  }
};

// What the adapters of some rows add to `out` [rows, columns], a product of `x`: for `members`
// layers whose outputs are side by side. `segments` has the first row and the end of each; `tensors`
// has for each a of all members, the factor of each of its columns, and every b.
template <typename T>
struct Updates {
  at::IntArrayRef segments;
  at::TensorList tensors;
  int64_t members;

  template <typename Rows>
  void add(const GroupedRows<Rows>& x, T* out, int64_t columns) const {
    const int64_t each = members + 2, count = static_cast<int64_t>(segments.size()) / 2;
    TORCH_CHECK(static_cast<int64_t>(tensors.size()) == count * each,
                "a, factors and every b of each segment");
    const auto one = [&](int64_t i) {
      add_one(x, segments[2 * i], segments[2 * i + 1], tensors.slice(i * each, each), out, columns);
    };
    // One segment is divided among the threads; of several, each thread takes some.
    if (count == 1) return one(0);
    at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) one(i);
    });
  }

 private:
  template <typename Rows>
  static void add_one(const GroupedRows<Rows>& x, int64_t start, int64_t stop,
                      at::TensorList adapter, T* out, int64_t columns) {
    const at::Tensor &a = adapter[0], &factors = adapter[1];
    const int64_t ranks = factors.numel(), rows = stop - start;
    TORCH_CHECK(start >= 0 && start < stop && stop <= x.groups.rows &&
                    a.size(0) == (ranks + COLUMNS - 1) / COLUMNS &&
                    factors.scalar_type() == at::kFloat && factors.is_contiguous(),
                "segments and adapters fit the product");
    if (ranks == 0) return;
    const GroupRange range{x.groups.of(start), x.groups.of(stop - 1) + 1};
    const int64_t first = x.groups.begin(range.begin);
    LineFloats low((x.groups.begin(range.end) - first) * ranks);
    multiply_with<1>(x, a,
                     PanelsToRows<float>{low.data() - first * ranks, nullptr, nullptr, ranks},
                     range);
    const float* factor = factors.const_data_ptr<float>();
    int64_t column = 0, offset = 0;
    for (const at::Tensor& b : adapter.slice(2)) {
      const int64_t rank = 2 * b.size(1);
      const int64_t width = std::min(b.size(0) * COLUMNS, columns - offset);
      if (rank > 0) {
        GroupedRows<FloatRows> scaled(Groups(rows, rank));
        std::vector<float> row(rank);
        for (int64_t r = 0; r < rows; ++r) {
          const float* from = low.data() + (start - first + r) * ranks + column;
          for (int64_t i = 0; i < rank; ++i) row[i] = from[i] * factor[column + i];
          scaled.put(r, 0, rank, row.data());
        }
        multiply_with<1>(scaled, b, AddToRows<T>{out + start * columns, columns, offset, width});
      }
      column += rank;
      offset += width;
    }
    TORCH_CHECK(column == ranks && offset == columns, "adapters fit the product");
  }
};

// Two finished panels, gate and up, become inputs of the next product.
template <typename T, typename Function>
struct PanelsToGate {
  GroupedRows<RowsOf<T>>& gated;
  const float* bias;
  int64_t inner;

  void write(const std::array<const float*, 2>& sums, int64_t r, int64_t unit) const {
    const int64_t c0 = unit * COLUMNS;
    T gate[COLUMNS], up[COLUMNS], out[COLUMNS];
#pragma omp simd
    for (int64_t c = 0; c < COLUMNS; ++c) {
      gate[c] = narrow<T>(bias != nullptr ? sums[0][c] + bias[c0 + c] : sums[0][c]);
      up[c] = narrow<T>(bias != nullptr ? sums[1][c] + bias[inner + c0 + c] : sums[1][c]);
    }
    gate_row<Function>(gate, up, out, COLUMNS);
    gated.put(r, c0, c0 + COLUMNS, out);
  }
};

struct Mlp {
  const at::Tensor &gate_up, &down;
  const Optional &gate_up_bias, &down_bias;
};

template <typename T, typename Function>
GroupedRows<RowsOf<T>> gated_rows(const GroupedRows<RowsOf<T>>& normal, const Mlp& mlp,
                                  int64_t inner, const Updates<T>& updates) {
  const int64_t rows = normal.groups.rows;
  GroupedRows<RowsOf<T>> gated(Groups(rows, inner));
  if (updates.segments.empty()) {
    multiply_with<2>(normal, mlp.gate_up,
                     PanelsToGate<T, Function>{gated, bias_of(mlp.gate_up_bias), inner});
    return gated;
  }
  const at::Tensor joined = at::empty({rows, 2 * inner}, at::CppTypeToScalarType<T>::value);
  T* at = joined.mutable_data_ptr<T>();
  multiply_with<1>(normal, mlp.gate_up,
                   PanelsToRows<T>{at, nullptr, bias_of(mlp.gate_up_bias), 2 * inner});
  updates.add(normal, at, 2 * inner);
  for_each_grouped(gated.groups, [&](int64_t r) {
    thread_local std::vector<T> row;
    row.resize(inner);
    const T* gate = at + r * 2 * inner;
    gate_row<Function>(gate, gate + inner, row.data(), inner);
    gated.put(r, 0, inner, row.data());
  });
  return gated;
}

// f(T{}) for the dtype of rows.
template <typename F>
at::Tensor dispatch(const at::Tensor& x, const F& f) {
  TORCH_CHECK(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16,
              "rows are float32 or bfloat16");
  return x.scalar_type() == at::kFloat ? f(float{}) : f(at::BFloat16{});
}

// As `mlp_block` of layer.cpp, without exports.
at::Tensor panel_mlp_block(const at::Tensor& x, const at::Tensor& norm_weight, double eps,
                           bool shifted, const at::Tensor& gate_up, const Optional& gate_up_bias,
                           const at::Tensor& down, const Optional& down_bias, bool gelu,
                           at::IntArrayRef segments, at::TensorList gate_up_updates,
                           at::TensorList down_updates) {
  const int64_t width = x.size(-1), inner = gate_up.size(0) / 2 * COLUMNS;
  TORCH_CHECK(x.is_contiguous() && is_panels(gate_up, 2 * inner, width) &&
                  is_panels(down, width, inner),
              "x is dense, and the weights fit it");
  const int64_t rows = x.numel() / width;
  check_vector(norm_weight, width, x.scalar_type(), "the norm");
  check_vector(gate_up_bias, 2 * inner, at::kFloat, "the bias of gate and up");
  check_vector(down_bias, width, at::kFloat, "the bias of down");
  return dispatch(x, [&]<typename T>(T) {
    at::Tensor out = at::empty_like(x);
    if (rows == 0) return out;
    const auto normal = normalised<T>(x, {norm_weight, static_cast<float>(eps), shifted}, rows);
    const Mlp mlp{gate_up, down, gate_up_bias, down_bias};
    const Updates<T> first{segments, gate_up_updates, 2}, second{segments, down_updates, 1};
    const auto gated = gelu ? gated_rows<T, GeluTanh>(normal, mlp, inner, first)
                            : gated_rows<T, Silu>(normal, mlp, inner, first);
    T* to = out.mutable_data_ptr<T>();
    multiply_with<1>(gated, down,
                     PanelsToRows<T>{to, x.const_data_ptr<T>(), bias_of(down_bias), width});
    if (!segments.empty()) second.add(gated, to, width);
    return out;
  });
}

// As `attention_block` of layer.cpp.
at::Tensor panel_attention_block(
    const at::Tensor& x, const at::Tensor& norm_weight, double eps, bool shifted,
    const at::Tensor& qkv, const Optional& qkv_bias, const Optional& q_norm, const Optional& k_norm,
    const at::Tensor& o, const Optional& o_bias, const at::Tensor& cos, const at::Tensor& sin,
    const at::Tensor& k_cache, const at::Tensor& v_cache, const at::Tensor& slots,
    const at::Tensor& table, const at::Tensor& query_start, const at::Tensor& context_len,
    double scale, int64_t window, double softcap, at::IntArrayRef segments,
    at::TensorList qkv_updates, at::TensorList o_updates, const Optional& wanted) {
  const int64_t width = x.size(-1), kv_heads = k_cache.size(2), dim = k_cache.size(3);
  TORCH_CHECK(width > 0 && dim > 0, "rows and heads have values");
  const int64_t rows = x.numel() / width;
  const Heads heads{o.size(1) * 2 / dim, kv_heads, dim};
  const Paged paged{k_cache, v_cache, slots, table, query_start, context_len};
  TORCH_CHECK(x.is_contiguous() && is_panels(o, width, heads.queries * dim) &&
                  is_panels(qkv, heads.width(), width) && k_cache.scalar_type() == x.scalar_type(),
              "x is dense, and the weights fit it and the cache");
  check_vector(norm_weight, width, x.scalar_type(), "the norm");
  check_vector(q_norm, dim, x.scalar_type(), "the norm of queries");
  check_vector(k_norm, dim, x.scalar_type(), "the norm of keys");
  check_vector(qkv_bias, heads.width(), at::kFloat, "the bias of queries, keys and values");
  check_vector(o_bias, width, at::kFloat, "the bias of the output");
  TORCH_CHECK(cos.is_contiguous() && sin.is_contiguous() && cos.numel() == sin.numel() &&
                  cos.numel() == rows * cos.size(-1) && cos.scalar_type() == x.scalar_type() &&
                  sin.scalar_type() == x.scalar_type(),
              "one dense row of cos and of sin a token");
  TORCH_CHECK(!wanted || segments.empty(), "segments are of all rows");
  check_slots(k_cache, v_cache, slots, rows);
  if (rows == 0) return at::empty_like(x);
  return dispatch(x, [&]<typename T>(T) {
    const Norm norm{norm_weight, static_cast<float>(eps), shifted};
    at::Tensor joined = at::empty({rows, heads.width()}, x.options());
    T* to = joined.mutable_data_ptr<T>();
    {
      const auto normal = normalised<T>(x, norm, rows);
      multiply_with<1>(normal, qkv,
                       PanelsToRows<T>{to, nullptr, bias_of(qkv_bias), heads.width()});
      const Updates<T> updates{segments, qkv_updates, 3};
      if (!segments.empty()) updates.add(normal, to, heads.width());
    }
    turn_and_store<T>(to, rows, heads, paged, cos, sin,
                      {data<T>(q_norm), data<T>(k_norm), norm.eps, norm.shifted});
    const at::Tensor queries =
        joined.narrow(1, 0, heads.queries * dim).view({rows, heads.queries, dim});
    at::Tensor mixed = paged_attention(queries, k_cache, v_cache, table, query_start, context_len,
                                       scale, window, softcap);
    at::Tensor residual = x;
    if (wanted) {
      mixed = mixed.index_select(0, *wanted);
      residual = x.view({rows, width}).index_select(0, *wanted);
    }
    const int64_t count = mixed.size(0), inputs = heads.queries * dim;
    at::Tensor out = at::empty({1, count, width}, x.options());
    const auto left = grouped<RowsOf<T>>(mixed.const_data_ptr<T>(), count, inputs, inputs);
    T* sums = out.mutable_data_ptr<T>();
    multiply_with<1>(left, o,
                     PanelsToRows<T>{sums, residual.const_data_ptr<T>(), bias_of(o_bias), width});
    const Updates<T> updates{segments, o_updates, 1};
    if (!segments.empty()) updates.add(left, sums, width);
    return out;
  });
}

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def(
      "panel_mlp_block(Tensor x, Tensor norm, float eps, bool shifted, Tensor gate_up, "
      "Tensor? gate_up_bias, Tensor down, Tensor? down_bias, bool gelu, int[] segments, "
      "Tensor[] gate_up_updates, Tensor[] down_updates) -> Tensor");
  m.def(
      "panel_attention_block(Tensor x, Tensor norm, float eps, bool shifted, Tensor qkv, "
      "Tensor? qkv_bias, Tensor? q_norm, Tensor? k_norm, Tensor o, Tensor? o_bias, Tensor cos, "
      "Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, Tensor table, "
      "Tensor query_start, Tensor context_len, float scale, int window, float softcap, "
      "int[] segments, Tensor[] qkv_updates, Tensor[] o_updates, Tensor? wanted) -> Tensor");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) {
  m.impl("panel_mlp_block", panel_mlp_block);
  m.impl("panel_attention_block", panel_attention_block);
}

}  // namespace
}  // namespace tandem
