// What happens to the heads of a joined projection between the product and the attention.
#pragma once

#include "rows.h"

namespace tandem {

// Where the rows of the batch are in the cache, and who sees what: as for `paged_attention`.
struct Paged {
  const at::Tensor &k_cache, &v_cache, &slots, &table, &query_start, &context_len;
};

// Heads of one token in the joined projection: queries, keys, values.
struct Heads {
  int64_t queries, keys, dim;
  int64_t width() const { return (queries + 2 * keys) * dim; }
};

// Norms of single heads; null: none.
template <typename T>
struct HeadNorms {
  const T *queries, *keys;
  float eps;
  bool shifted;
};

// Queries are normalised and rotated in place; keys likewise into the cache, values copied there.
template <typename T>
void turn_and_store(T* qkv, int64_t rows, const Heads& heads, const Paged& paged,
                    const at::Tensor& cos, const at::Tensor& sin, const HeadNorms<T>& norms) {
  constexpr int64_t grain_elements = 16384;  // worth a thread
  const int64_t dim = heads.dim, angles = cos.size(-1);
  const int64_t block_size = paged.k_cache.size(1), unit = paged.k_cache.stride(1);
  const int64_t* slot = paged.slots.const_data_ptr<int64_t>();
  T* keys = paged.k_cache.mutable_data_ptr<T>();
  T* values = paged.v_cache.mutable_data_ptr<T>();
  const T *c = cos.const_data_ptr<T>(), *s = sin.const_data_ptr<T>();
  const int64_t grain = std::max<int64_t>(1, grain_elements / heads.width());
  const auto turn = [&](int64_t t) {
    T* x = qkv + t * heads.width();
    const int64_t at = slot[t] / block_size * paged.k_cache.stride(0) + slot[t] % block_size * unit;
    for (int64_t h = 0; h < heads.queries + heads.keys; ++h, x += dim) {
      const bool key = h >= heads.queries;
      const T* weight = key ? norms.keys : norms.queries;
      if (weight != nullptr) normalise(x, weight, x, dim, norms.eps, norms.shifted);
      T* to = key ? keys + at + (h - heads.queries) * dim : x;
      rotate(x, c + t * angles, s + t * angles, to, dim, angles);
    }
    std::copy(x, x + heads.keys * dim, values + at);
  };
  for_each_item(rows, grain, [&](const auto& take) {
    for (int64_t t, end; take(t, end);) {
      for (; t < end; ++t) turn(t);
    }
  });
}

}  // namespace tandem
