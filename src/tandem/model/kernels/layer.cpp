// The two halves of a decoder layer as one call each: attention and the gated inner layer, with
// their norms and residual sums.
//
// They compute what the single operators compute, value for value, but what lies between two
// products stays in the form in which the next one reads it: a normalised or gated row goes
// straight into tiles, keys and values straight into the cache.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/index_select.h>
#include <torch/library.h>

#include "attention.h"
#include "heads.h"
#include "lora.h"
#include "matmul.h"

namespace tandem {
namespace {

#ifdef TANDEM_AMX

using Optional = std::optional<at::Tensor>;

constexpr int64_t GRAIN = 16384;  // elements worth a thread

const BFloat16* data(const at::Tensor& x) { return x.const_data_ptr<BFloat16>(); }
const BFloat16* data(const Optional& x) { return x ? data(*x) : nullptr; }
const float* bias_of(const Optional& x) { return x ? x->const_data_ptr<float>() : nullptr; }

// Room for `rows` rows of `steps` steps as tiles; rows past the end hold anything, since what is
// computed from them is not read.
at::Tensor empty_tiles(const at::Tensor& like, int64_t rows, int64_t steps) {
  return at::empty({(rows + SIDE - 1) / SIDE * steps * STEP}, like.options());
}

Product product(const at::Tensor& tiles, const at::Tensor& packed, int64_t rows,
                const Updates& updates) {
  const int64_t steps = packed.size(1);
  return {Left::of_tiles(data(tiles), steps), data(packed), rows, steps, packed.size(0), steps,
          updates.list()};
}

struct Norm {
  const at::Tensor& weight;
  float eps;
  bool shifted;
};

// Normalised rows of a dense x [..., k], as tiles.
at::Tensor normalised_tiles(const at::Tensor& x, const Norm& norm, int64_t rows) {
  const int64_t width = x.size(-1), steps = width / SIDE;
  at::Tensor tiles = empty_tiles(x, rows, steps);
  const BFloat16 *from = data(x), *weight = data(norm.weight);
  BFloat16* to = tiles.mutable_data_ptr<BFloat16>();
  for_each_item(rows, std::max<int64_t>(1, GRAIN / width), [&](const auto& take) {
    for (int64_t r, end; take(r, end);) {
      for (; r < end; ++r) {
        normalise_wide(from + r * width, weight, to + in_tiles(r, 0, steps), width, STEP, norm.eps,
                       norm.shifted);
      }
    }
  });
  return tiles;
}

// Where gate and up of some rows are kept besides: `ranges` has the first row, the end, and the first
// row among the tiles [blocks, 2 * steps, 32, 32] of each of `tiles`.
class Exports {
 public:
  Exports(at::IntArrayRef ranges, at::TensorList tiles, int64_t rows, int64_t steps) {
    TORCH_CHECK(ranges.size() == 3 * tiles.size(), "first row, end and place of each export");
    if (!tiles.empty()) rows_.resize((rows + SIDE - 1) / SIDE * SIDE);
    for (size_t i = 0; i < tiles.size(); ++i) {
      const int64_t start = ranges[3 * i], stop = ranges[3 * i + 1], first = ranges[3 * i + 2];
      const at::Tensor& to = tiles[i];
      TORCH_CHECK(0 <= start && start <= stop && stop <= rows && first >= 0 && to.dim() == 4 &&
                      to.is_contiguous() && to.scalar_type() == at::kBFloat16 &&
                      to.size(1) == 2 * steps && to.size(2) == SIDE && to.size(3) == SIDE &&
                      first + stop - start <= to.size(0) * SIDE,
                  "exported rows fit their tiles");
      BFloat16* at = to.mutable_data_ptr<BFloat16>();
      for (int64_t r = start; r < stop; ++r) rows_[r] = at + in_tiles(first + r - start, 0, 2 * steps);
    }
  }

  // For each row, where its first step goes, or null; null if nothing is kept of any row.
  BFloat16* const* rows() const { return rows_.empty() ? nullptr : rows_.data(); }

 private:
  std::vector<BFloat16*> rows_;
};

// Two finished blocks, gate and up, become one step of the tiles of the next product.
template <typename Function>
struct ToGate {
  BFloat16* tiles;
  const float* bias;
  int64_t rows, steps;
  BFloat16* const* exports;

  void claim(int64_t b, int64_t unit) const {
    const char* at = reinterpret_cast<const char*>(tiles + (b * steps + unit) * STEP);
    for (int64_t i = 0; i < STEP_LINES; ++i) __builtin_prefetch(at + i * 64, 1);
  }
  [[gnu::always_inline]] void write(const std::array<const float*, 2>& blocks, int64_t b,
                                    int64_t unit, int64_t r) const {
    const __m512i gate = round_row(blocks[0] + r * SIDE, bias ? bias + unit * SIDE : nullptr);
    const __m512i up = round_row(blocks[1] + r * SIDE, bias ? bias + (steps + unit) * SIDE : nullptr);
    _mm512_store_si512(tiles + (b * steps + unit) * STEP + r * SIDE, gate_32<Function>(gate, up));
    BFloat16* kept = exports ? exports[b * SIDE + r] : nullptr;
    if (kept != nullptr) {
      _mm512_store_si512(kept + unit * STEP, gate);
      _mm512_store_si512(kept + (steps + unit) * STEP, up);
    }
  }
};

// x + down(act(gate(n)) * up(n)), n = norm(x); x dense [..., hidden], gate and up joined. What enters
// the gate and up are kept for the rows that `Exports` says.
at::Tensor mlp_block(const at::Tensor& x, const at::Tensor& norm_weight, double eps, bool shifted,
                     const at::Tensor& gate_up, const Optional& gate_up_bias,
                     const at::Tensor& down, const Optional& down_bias, bool gelu,
                     at::IntArrayRef segments, at::TensorList gate_up_updates,
                     at::TensorList down_updates, at::IntArrayRef ranges, at::TensorList kept) {
  const int64_t width = x.size(-1), rows = x.numel() / width, inner = down.size(1);
  TORCH_CHECK(amx_usable(), "the system does not grant AMX");
  TORCH_CHECK(x.is_contiguous() && width == gate_up.size(1) * SIDE &&
                  gate_up.size(0) == 2 * inner && down.size(0) * SIDE == width,
              "x is dense, and all widths are multiples of ", SIDE);
  check_vector(norm_weight, width, at::kBFloat16, "the norm");
  check_vector(gate_up_bias, 2 * inner * SIDE, at::kFloat, "the bias of gate and up");
  check_vector(down_bias, width, at::kFloat, "the bias of down");
  at::Tensor out = at::empty_like(x);
  if (rows == 0) return out;
  const at::Tensor normal =
      normalised_tiles(x, {norm_weight, static_cast<float>(eps), shifted}, rows);
  at::Tensor gated = empty_tiles(x, rows, inner);
  const Updates inner_updates(normal, rows, gate_up.size(1), segments, gate_up_updates, 2);
  const Product first = product(normal, gate_up, rows, inner_updates);
  const Exports exports(ranges, kept, rows, inner);
  BFloat16* to = gated.mutable_data_ptr<BFloat16>();
  if (gelu) {
    run_product<2>(first, ToGate<GeluTanh>{to, bias_of(gate_up_bias), rows, inner, exports.rows()});
  } else {
    run_product<2>(first, ToGate<Silu>{to, bias_of(gate_up_bias), rows, inner, exports.rows()});
  }
  const Updates updates(gated, rows, inner, segments, down_updates, 1);
  BFloat16* sums = out.mutable_data_ptr<BFloat16>();
  run_product<1>(product(gated, down, rows, updates),
                 ToRows{sums, data(x), bias_of(down_bias), rows, width});
  return out;
}

// residual + o(mixed); mixed dense [rows, heads, dim].
at::Tensor project(const at::Tensor& mixed, const at::Tensor& residual, const at::Tensor& o,
                   const Optional& bias, at::IntArrayRef segments, at::TensorList updates) {
  const int64_t rows = mixed.size(0), steps = o.size(1), width = o.size(0) * SIDE;
  at::Tensor out = at::empty({1, rows, width}, mixed.options());
  if (rows == 0) return out;
  const ToRows to{out.mutable_data_ptr<BFloat16>(), data(residual), bias_of(bias), rows, width};
  if (rows <= SIDE && segments.empty()) {
    run_product<1>({Left::of_rows(data(mixed), steps * SIDE), data(o), rows, steps, o.size(0)}, to);
    return out;
  }
  const at::Tensor tiles = pack_rows(mixed, rows, steps * SIDE, steps);
  const Updates added(tiles, rows, steps, segments, updates, 1);
  run_product<1>(product(tiles, o, rows, added), to);
  return out;
}

// x + o(attention(qkv(norm(x)))); x dense [1, T, hidden], cos and sin dense [1, T, R]. Of the
// rows `wanted` alone, if given, though keys and values of all are stored; not with updates.
at::Tensor attention_block(const at::Tensor& x, const at::Tensor& norm_weight, double eps,
                           bool shifted, const at::Tensor& qkv, const Optional& qkv_bias,
                           const Optional& q_norm, const Optional& k_norm, const at::Tensor& o,
                           const Optional& o_bias, const at::Tensor& cos, const at::Tensor& sin,
                           const at::Tensor& k_cache, const at::Tensor& v_cache,
                           const at::Tensor& slots, const at::Tensor& table,
                           const at::Tensor& query_start, const at::Tensor& context_len,
                           double scale, int64_t window, double softcap,
                           at::IntArrayRef segments, at::TensorList qkv_updates,
                           at::TensorList o_updates, const Optional& wanted) {
  const int64_t width = x.size(-1), rows = x.numel() / width;
  const int64_t kv_heads = k_cache.size(2), dim = k_cache.size(3);
  const Heads heads{o.size(1) * SIDE / dim, kv_heads, dim};
  const Paged paged{k_cache, v_cache, slots, table, query_start, context_len};
  TORCH_CHECK(amx_usable(), "the system does not grant AMX");
  TORCH_CHECK(x.is_contiguous() && width == qkv.size(1) * SIDE && o.size(0) * SIDE == width &&
                  (heads.width() + SIDE - 1) / SIDE == qkv.size(0),
              "x is dense, and the weights fit it and the cache");
  check_vector(norm_weight, width, at::kBFloat16, "the norm");
  check_vector(q_norm, dim, at::kBFloat16, "the norm of queries");
  check_vector(k_norm, dim, at::kBFloat16, "the norm of keys");
  check_vector(qkv_bias, qkv.size(0) * SIDE, at::kFloat, "the bias of queries, keys and values");
  check_vector(o_bias, width, at::kFloat, "the bias of the output");
  TORCH_CHECK(cos.is_contiguous() && sin.is_contiguous() && cos.numel() == sin.numel() &&
                  cos.numel() == rows * cos.size(-1) && cos.scalar_type() == at::kBFloat16 &&
                  sin.scalar_type() == at::kBFloat16,
              "one dense row of cos and of sin a token");
  TORCH_CHECK(!wanted || segments.empty(), "segments are of all rows");
  check_slots(k_cache, v_cache, slots, rows);
  if (rows == 0) return at::empty_like(x);
  const Norm norm{norm_weight, static_cast<float>(eps), shifted};
  at::Tensor joined = at::empty({rows, heads.width()}, x.options());
  BFloat16* to = joined.mutable_data_ptr<BFloat16>();
  const at::Tensor normal = normalised_tiles(x, norm, rows);
  const Updates updates(normal, rows, qkv.size(1), segments, qkv_updates, 3);
  run_product<1>(product(normal, qkv, rows, updates),
                 ToRows{to, nullptr, bias_of(qkv_bias), rows, heads.width()});
  turn_and_store<BFloat16>(to, rows, heads, paged, cos, sin,
                           {data(q_norm), data(k_norm), norm.eps, norm.shifted});
  const at::Tensor queries =
      joined.narrow(1, 0, heads.queries * dim).view({rows, heads.queries, dim});
  at::Tensor mixed = paged_attention(queries, k_cache, v_cache, table, query_start, context_len,
                                     scale, window, softcap);
  at::Tensor residual = x;
  if (wanted) {
    mixed = mixed.index_select(0, *wanted);
    residual = x.view({rows, width}).index_select(0, *wanted);
  }
  return project(mixed, residual, o, o_bias, segments, o_updates);
}

#endif

TORCH_LIBRARY_FRAGMENT(tandem, m) {
#ifdef TANDEM_AMX
  m.def(
      "mlp_block(Tensor x, Tensor norm, float eps, bool shifted, Tensor gate_up, "
      "Tensor? gate_up_bias, Tensor down, Tensor? down_bias, bool gelu, int[] segments, "
      "Tensor[] gate_up_updates, Tensor[] down_updates, int[] ranges, Tensor(a!)[] kept) -> Tensor");
  m.def(
      "attention_block(Tensor x, Tensor norm, float eps, bool shifted, Tensor qkv, "
      "Tensor? qkv_bias, Tensor? q_norm, Tensor? k_norm, Tensor o, Tensor? o_bias, Tensor cos, "
      "Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, Tensor table, "
      "Tensor query_start, Tensor context_len, float scale, int window, float softcap, "
      "int[] segments, Tensor[] qkv_updates, Tensor[] o_updates, Tensor? wanted) -> Tensor");
#endif
}

#ifdef TANDEM_AMX
TORCH_LIBRARY_IMPL(tandem, CPU, m) {
  m.impl("mlp_block", mlp_block);
  m.impl("attention_block", attention_block);
}
#endif

}  // namespace
}  // namespace tandem
