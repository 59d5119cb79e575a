// Paged attention for any mix of spans, and the scatter that fills the cache.
//
// A work item is a tile of query rows (token, head) that share one KV head of one span, against one
// partition of its keys; partitions are merged afterwards. All sums are in float32. Here are the
// division of work and the operators.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#include "plain_attention.h"
#include "turned_values.h"

namespace tandem {
namespace {

constexpr int MIN_PARTITION = 512;   // keys worth a work item of their own
constexpr int ITEMS_PER_THREAD = 4;  // enough to balance uneven spans

// Writes sums / total of one item's rows.
template <typename T>
void finish(const Problem<T>& p, const Item& it, const Partial& o) {
  p.each_row(it, [&](int64_t r, int64_t token, int64_t head) {
    const float by = 1.0f / o.total[r];
    const float* from = o.sums + r * p.dim;
    T* to = p.out + (token * p.heads + head) * p.dim;
#pragma omp simd
    for (int64_t d = 0; d < p.dim; ++d) to[d] = narrow<T>(from[d] * by);
  });
}

// Merges `others` into `o`, row by row.
void merge(const Partial& o, const Partial& other, int64_t rows, int64_t dim) {
  for (int64_t r = 0; r < rows; ++r) {
    const float maximum = std::max(o.maximum[r], other.maximum[r]);
    const float mine = std::exp2(o.maximum[r] - maximum);
    const float theirs = std::exp2(other.maximum[r] - maximum);
    o.maximum[r] = maximum;
    o.total[r] = o.total[r] * mine + other.total[r] * theirs;
    float* a = o.sums + r * dim;
    const float* b = other.sums + r * dim;
    for (int64_t d = 0; d < dim; ++d) a[d] = a[d] * mine + b[d] * theirs;
  }
}

// With `by_keys`, the heads of a span read the same part of its keys one after the other, and few
// rows a part that stays in the caches until all have: keys of all heads lie side by side.
template <typename T>
std::vector<Item> divide(const Problem<T>& p, int64_t spans, bool by_keys) {
  constexpr int32_t most = MAX_TILES * TILE_ROWS;
  const int32_t group = static_cast<int32_t>(p.group);
  int64_t whole = 0;
  for (int64_t s = 0; s < spans; ++s) {
    whole += ((p.query_start[s + 1] - p.query_start[s]) * group + most - 1) / most * p.kv_heads;
  }
  const int64_t wanted = ITEMS_PER_THREAD * at::get_num_threads();
  const int64_t split = std::max<int64_t>(1, wanted / std::max<int64_t>(whole, 1));
  std::vector<Item> items;
  int32_t slots = 0;
  for (int64_t s = spans - 1; s >= 0; --s) {
    const int32_t tokens = p.query_start[s + 1] - p.query_start[s], rows = tokens * group;
    for (int32_t row0 = (rows - 1) / most * most; row0 >= 0 && rows > 0; row0 -= most) {
      const int32_t n = std::min(most, rows - row0);
      const int32_t first = p.context_len[s] - tokens + row0 / group;
      const int32_t end = p.context_len[s] - tokens + (row0 + n - 1) / group + 1;
      const int32_t begin =
          p.window == 0 ? 0 : std::max<int32_t>(0, first + 1 - p.window) / 16 * 16;
      const int64_t most_parts = std::max<int64_t>(1, (end - begin) / MIN_PARTITION);
      const int32_t parts = static_cast<int32_t>(
          by_keys && n <= TILE_ROWS ? most_parts : std::min(split, most_parts));
      const int32_t size = ((end - begin + parts - 1) / parts + 15) / 16 * 16;
      const int32_t heads = static_cast<int32_t>(p.kv_heads);
      for (int32_t place = 0; place < heads * parts; ++place) {
        const int32_t h = by_keys ? place % heads : place / parts;
        const int32_t i = by_keys ? place / heads : place % parts;
        items.push_back({static_cast<int32_t>(s), h, row0, n, begin + i * size,
                         std::min(end, begin + (i + 1) * size), i, parts,
                         parts > 1 ? slots + h * parts : -1});
      }
      slots += parts > 1 ? heads * parts : 0;
    }
  }
  return items;
}

template <typename T>
void attend(const Problem<T>& p, int64_t spans) {
  const int64_t rows = MAX_TILES * TILE_ROWS, size = rows * (p.dim + 2);
  bool tiled = false;
#ifdef TANDEM_AMX
  tiled = std::is_same_v<T, at::BFloat16> && amx_usable() && p.dim % 32 == 0 &&
          p.block_size % 16 == 0;
  std::optional<TurnedValues> turned;
  if constexpr (std::is_same_v<T, at::BFloat16>) {
    if (tiled) turned.emplace(p, spans);
  }
#endif
  const std::vector<Item> items = divide(p, spans, !tiled);
  int64_t slots = 0;
  for (const Item& it : items) slots += it.slot >= 0;
  LineFloats partials(slots * size);
  const auto view = [&](float* at) {
    return Partial{at, at + rows * p.dim, at + rows * (p.dim + 1)};
  };
  const auto part = [&](int64_t slot) { return view(partials.data() + slot * size); };
  const int64_t count = static_cast<int64_t>(items.size());
  const int64_t threads = at::get_num_threads();
  int64_t grain = std::clamp<int64_t>(count / (16 * threads), 1, 8);
  // One thread takes all heads of a part, whose keys lie side by side, where enough parts are left.
  if (!tiled) grain = std::max(grain, std::min(p.kv_heads, count / (4 * threads)));
  for_each_item(count, grain, [&](const auto& take) {
    LineFloats own(size);
    const auto run = [&](const auto& one) {
      for (int64_t i, end; take(i, end);) {
        for (; i < end; ++i) {
          const Item& it = items[i];
          const Partial o = it.slot < 0 ? view(own.data()) : part(it.slot + it.partition);
          // The items of one span and head read the same keys.
          const Item* next = i + 1 < end && !items[i + 1].same_keys(it) ? &items[i + 1] : nullptr;
          one(it, next, o);
          if (it.slot < 0) finish(p, it, o);
        }
      }
    };
#ifdef TANDEM_AMX
    if constexpr (std::is_same_v<T, at::BFloat16>) {
      if (tiled) {
        const Tiles tiles(TileConfig{});
        Workspace workspace(p.dim);
        run([&](const Item& it, const Item* next, const Partial& o) {
          attend_tiles(p, it, next, *turned, o, workspace);
        });
        return;
      }
    }
#endif
    PlainWorkspace workspace(p.dim);
    run([&](const Item& it, const Item*, const Partial& o) {
      attend_plain(p, it, o, workspace);
    });
  });
  if (slots == 0) return;
  at::parallel_for(0, items.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Item& it = items[i];
      if (it.slot < 0 || it.partition > 0) continue;
      const Partial o = part(it.slot);
      for (int32_t i = 1; i < it.partitions; ++i) {
        merge(o, part(it.slot + i), it.rows, p.dim);
      }
      finish(p, it, o);
    }
  });
}

void check_cache(const at::Tensor& k_cache, const at::Tensor& v_cache) {
  TORCH_CHECK(k_cache.dim() == 4 && k_cache.sizes() == v_cache.sizes() &&
                  k_cache.strides() == v_cache.strides() && k_cache.stride(3) == 1 &&
                  k_cache.stride(2) == k_cache.size(3),
              "the caches are [blocks, block_size, kv_heads, dim] alike, heads and dims dense");
}

}  // namespace

at::Tensor paged_attention(const at::Tensor& q, const at::Tensor& k_cache,
                           const at::Tensor& v_cache, const at::Tensor& block_table,
                           const at::Tensor& query_start, const at::Tensor& context_len,
                           double scale, int64_t window, double softcap) {
  check_cache(k_cache, v_cache);
  TORCH_CHECK(q.dim() == 3 && q.stride(2) == 1 && q.size(2) == k_cache.size(3) &&
                  q.size(1) % k_cache.size(2) == 0 && q.scalar_type() == k_cache.scalar_type() &&
                  v_cache.scalar_type() == q.scalar_type(),
              "q is [tokens, heads, dim] with the cache's dim and dtype");
  for (const at::Tensor& t : {block_table, query_start, context_len}) {
    TORCH_CHECK(t.scalar_type() == at::kInt && t.is_contiguous(), "tables are contiguous int32");
  }
  const int64_t spans = context_len.size(0);
  TORCH_CHECK(query_start.size(0) == spans + 1 && block_table.dim() == 2 &&
                  block_table.size(0) == spans,
              "one table row, one context length a span");
  at::Tensor out = at::empty(q.sizes(), q.options());
  TANDEM_DISPATCH(q.scalar_type(), "paged_attention", [&] {
    Problem<scalar_t> p;
    p.q = q.const_data_ptr<scalar_t>();
    p.k = k_cache.const_data_ptr<scalar_t>();
    p.v = v_cache.const_data_ptr<scalar_t>();
    p.out = out.mutable_data_ptr<scalar_t>();
    p.table = block_table.const_data_ptr<int32_t>();
    p.query_start = query_start.const_data_ptr<int32_t>();
    p.context_len = context_len.const_data_ptr<int32_t>();
    p.q_token = q.stride(0);
    p.q_head = q.stride(1);
    p.token_stride = k_cache.stride(1);
    p.block_stride = k_cache.stride(0);
    p.table_width = block_table.size(1);
    p.heads = q.size(1);
    p.kv_heads = k_cache.size(2);
    p.group = p.heads / p.kv_heads;
    p.dim = q.size(2);
    p.block_size = k_cache.size(1);
    p.scale = static_cast<float>(scale);
    p.softcap = static_cast<float>(softcap);
    p.window = static_cast<int32_t>(window);
    attend(p, spans);
  });
  return out;
}

void check_slots(const at::Tensor& k_cache, const at::Tensor& v_cache, const at::Tensor& slots,
                 int64_t tokens) {
  check_cache(k_cache, v_cache);
  TORCH_CHECK(slots.scalar_type() == at::kLong && slots.is_contiguous() && slots.size(0) == tokens,
              "slots is one int64 a token");
  const int64_t capacity = k_cache.size(0) * k_cache.size(1);
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < tokens; ++t) {
    TORCH_CHECK(slot[t] >= 0 && slot[t] < capacity, "slot ", slot[t], " lies outside the cache");
  }
}

namespace {

void write_kv(const at::Tensor& k, const at::Tensor& v, const at::Tensor& k_cache,
              const at::Tensor& v_cache, const at::Tensor& slots) {
  TORCH_CHECK(k.dim() == 3 && k.sizes() == v.sizes() && k.stride(2) == 1 && v.stride(2) == 1 &&
                  k.scalar_type() == k_cache.scalar_type() &&
                  v.scalar_type() == v_cache.scalar_type(),
              "k and v are [tokens, kv_heads, dim] in the cache's dtype");
  check_slots(k_cache, v_cache, slots, k.size(0));
  const int64_t heads = k.size(1), bytes = k.size(2) * k.element_size(), unit = k.element_size();
  const int64_t block_size = k_cache.size(1);
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  const auto copy = [&](const at::Tensor& from, const at::Tensor& to, int64_t t) {
    const int64_t block = slot[t] / block_size, offset = slot[t] % block_size;
    const char* source = static_cast<const char*>(from.const_data_ptr());
    source += t * from.stride(0) * unit;
    char* target = static_cast<char*>(to.mutable_data_ptr());
    target += (block * to.stride(0) + offset * to.stride(1)) * unit;
    for (int64_t h = 0; h < heads; ++h) {
      std::memcpy(target + h * bytes, source + h * from.stride(1) * unit, bytes);
    }
  };
  at::parallel_for(0, k.size(0), 64, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      copy(k, k_cache, t);
      copy(v, v_cache, t);
    }
  });
}

TORCH_LIBRARY_FRAGMENT(tandem, m) {
  m.def(
      "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, "
      "Tensor query_start, Tensor context_len, float scale, int window, float softcap) -> Tensor");
  m.def("write_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots) -> ()");
}

TORCH_LIBRARY_IMPL(tandem, CPU, m) {
  m.impl("paged_attention", paged_attention);
  m.impl("write_kv", write_kv);
}

}  // namespace
}  // namespace tandem
