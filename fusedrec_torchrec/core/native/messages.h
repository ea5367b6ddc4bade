// Local rows into messages to their owners, and out of them; see exchange/routing.py.
#pragma once

#include "checks.h"

#include <ATen/ops/empty.h>

#include <type_traits>
#include <vector>

namespace {

// Writes keys as rows of their part, and returns whether any key is outside of it.
template <typename Key>
bool write_rows(const Key* keys, int64_t count, Key start, Key end, int32_t* out) {
  using Unsigned = std::make_unsigned_t<Key>;
  const Unsigned last = static_cast<Unsigned>(end) - static_cast<Unsigned>(start) - 1;
  Unsigned signs = 0; // without a branch, so that the loop is one of vector instructions
  for (int64_t i = 0; i < count; ++i) {
    const Unsigned row = static_cast<Unsigned>(keys[i]) - static_cast<Unsigned>(start);
    signs |= row | (last - row);
    out[i] = static_cast<int32_t>(row);
  }
  return static_cast<Key>(signs) < 0;
}

// Writes the local rows of the unique keys for each owner: bucket after bucket, from element
// starts[owner] of the words on.  Owners without a start are the replicas.
void pack_rows(const Tensor& keys_U, const Tensor& counts_KO, const Tensor& part_starts_P1,
               at::IntArrayRef starts_W, Tensor words) {
  const Checks check("pack_rows");
  check.dense("keys", keys_U, {at::kInt, at::kLong});
  check.dense("counts", counts_KO, {at::kLong});
  check.is_matrix("counts", counts_KO);
  check.dense("part_starts", part_starts_P1, {keys_U.scalar_type()});
  check.dense("words", words, {at::kInt});
  const int64_t buckets = counts_KO.size(0), owners = counts_KO.size(1);
  const int64_t ranks = static_cast<int64_t>(starts_W.size());
  check.length("part_starts", part_starts_P1.numel(), buckets * owners + 1);
  check.that(ranks <= owners, "starts must be for at most ", owners, " owners, not for ", ranks);
  // Keys behind the last one that is counted are padding.
  const int64_t counted = check.sum("counts", as_array(counts_KO));
  check.that(counted <= keys_U.numel(), "counts are of ", counted, " keys, but there are ",
             keys_U.numel());
  const int64_t* counts = counts_KO.const_data_ptr<int64_t>();
  std::vector<int32_t*> target(ranks);
  for (int64_t r = 0; r < ranks; ++r) {
    int64_t rows = 0;
    for (int64_t k = 0; k < buckets; ++k) {
      rows += counts[k * owners + r];
    }
    check.that(starts_W[r] >= 0 && starts_W[r] <= words.numel() - rows, "the ", rows,
               " rows of owner ", r, " do not fit from ", starts_W[r], " on");
    target[r] = words.mutable_data_ptr<int32_t>() + starts_W[r];
  }
  bool outside = false;
  const auto write = [&](const auto* keys, const auto* starts) {
    for (int64_t p = 0; p < buckets * owners; ++p) {
      if (p % owners >= ranks) {
        keys += counts[p];
        continue;
      }
      int32_t*& out = target[p % owners];
      outside |= write_rows(keys, counts[p], starts[p], starts[p + 1], out);
      keys += counts[p];
      out += counts[p];
    }
  };
  keys_U.scalar_type() == at::kInt
      ? write(keys_U.const_data_ptr<int32_t>(), part_starts_P1.const_data_ptr<int32_t>())
      : write(keys_U.const_data_ptr<int64_t>(), part_starts_P1.const_data_ptr<int64_t>());
  check.that(!outside, "every key must be in the part that it is counted for");
}

// What is behind the headers of all messages, segment by segment: sizes[r * segments + k] words of
// rank r belong to segment k, one segment after another.
std::vector<Tensor> unpack(const Tensor& messages, int64_t header, at::IntArrayRef sizes_WK,
                           int64_t segments) {
  const Checks check("unpack");
  check.dense("messages", messages, {at::kInt});
  check.is_matrix("messages", messages);
  const int64_t ranks = messages.size(0), width = messages.size(1);
  check.that(0 <= header && header <= width, "header must be in [0, ", width, "], not ", header);
  check.at_least("segments", segments, 1);
  check.length("sizes", sizes_WK.size(), check.product("sizes", ranks, segments));
  check.sum("sizes", sizes_WK);
  std::vector<int64_t> totals(segments, 0), at(ranks, header);
  for (int64_t r = 0; r < ranks; ++r) {
    int64_t own = 0;
    for (int64_t k = 0; k < segments; ++k) {
      own += sizes_WK[r * segments + k];
      totals[k] += sizes_WK[r * segments + k];
    }
    check.that(own <= width - header, "damaged message of rank ", r);
  }
  std::vector<Tensor> found;
  for (int64_t k = 0; k < segments; ++k) {
    found.push_back(at::empty({totals[k]}, messages.options()));
    int32_t* out = found.back().mutable_data_ptr<int32_t>();
    for (int64_t r = 0; r < ranks; ++r) {
      const int64_t size = sizes_WK[r * segments + k];
      out = std::copy_n(messages.const_data_ptr<int32_t>() + r * width + at[r], size, out);
      at[r] += size;
    }
  }
  return found;
}

} // namespace
