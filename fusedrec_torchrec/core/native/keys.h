// Ids to keys of the fused key space; see exchange/keys.py.
#pragma once

#include "checks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <limits>
#include <tuple>
#include <type_traits>

namespace {

template <typename Id, typename Key>
bool fill_keys(const Id* ids, const Tensor& counts_S, const Tensor& rows_S, const Tensor& starts_SW,
               const Tensor& shifts_SW, Key* keys) {
  const int64_t ranks = starts_SW.size(1);
  const int64_t* counts = counts_S.const_data_ptr<int64_t>();
  const int64_t* rows = rows_S.const_data_ptr<int64_t>();
  bool bad = false;
  for (int64_t s = 0; s < counts_S.numel(); ++s) {
    const int64_t* starts = starts_SW.const_data_ptr<int64_t>() + s * ranks;
    const int64_t* shifts = shifts_SW.const_data_ptr<int64_t>() + s * ranks;
    for (int64_t i = 0; i < counts[s]; ++i) {
      const int64_t id = ids[i];
      bad |= static_cast<uint64_t>(id) >= static_cast<uint64_t>(rows[s]);
      int64_t owner = 0;
      if (ranks <= 8) {
        for (int64_t r = 1; r < ranks; ++r) {
          owner += id >= starts[r];
        }
      } else {
        owner = std::upper_bound(starts + 1, starts + ranks, id) - starts - 1;
      }
      // Unsigned, because an id that is out of range may overflow.
      keys[i] = static_cast<Key>(static_cast<uint64_t>(id) + static_cast<uint64_t>(shifts[owner]));
    }
    ids += counts[s];
    keys += counts[s];
  }
  return bad;
}

// Keys of ids that come slot after slot, and whether any id is outside of its table; if so, all
// keys are zero.  Rank r owns the rows of a slot's table from starts[r] on; key = id + shifts[r].
std::tuple<Tensor, Tensor> keys(const Tensor& ids_N, const Tensor& counts_S, const Tensor& rows_S,
                                const Tensor& starts_SW, const Tensor& shifts_SW,
                                at::ScalarType key_type) {
  const Checks check("keys");
  check.dense("ids", ids_N, {at::kInt, at::kLong});
  check.dense("counts", counts_S, {at::kLong});
  check.dense("rows", rows_S, {at::kLong});
  check.dense("starts", starts_SW, {at::kLong});
  check.dense("shifts", shifts_SW, {at::kLong});
  check.is_matrix("starts", starts_SW);
  const int64_t slots = counts_S.numel();
  check.length("rows", rows_S.numel(), slots);
  check.that(starts_SW.size(0) == slots && starts_SW.size(1) > 0 &&
                 shifts_SW.sizes() == starts_SW.sizes(),
             "starts and shifts must have a line for each of ", slots,
             " slots and a column for each rank, not the shapes ", starts_SW.sizes(), " and ",
             shifts_SW.sizes());
  check.length("ids", ids_N.numel(), check.sum("counts", as_array(counts_S)));
  check.that(key_type == at::kInt || key_type == at::kLong, "key_type must be Int or Long, not ",
             key_type);
  Tensor keys_N = at::empty(ids_N.sizes(), ids_N.options().dtype(key_type));
  const auto fill_as = [&](const auto* ids, auto* keys) {
    return fill_keys(ids, counts_S, rows_S, starts_SW, shifts_SW, keys);
  };
  const auto fill = [&](const auto* ids) {
    return key_type == at::kInt ? fill_as(ids, keys_N.mutable_data_ptr<int32_t>())
                                : fill_as(ids, keys_N.mutable_data_ptr<int64_t>());
  };
  const bool bad = ids_N.scalar_type() == at::kInt ? fill(ids_N.const_data_ptr<int32_t>())
                                                   : fill(ids_N.const_data_ptr<int64_t>());
  if (bad) {
    keys_N.zero_();
  }
  return {keys_N, at::full({}, bad, ids_N.options().dtype(at::kBool))};
}

template <typename Id>
FOR_THIS_CPU bool all_below(const Id* ids, int64_t count, Id rows) {
  Id signs = 0; // without a branch, so that the loop is one of vector instructions
  for (int64_t i = 0; i < count; ++i) {
    signs |= ids[i] | (rows - 1 - (ids[i] & std::numeric_limits<Id>::max()));
  }
  return signs >= 0;
}

// Whether all ids, which come slot after slot, are rows of their tables.
bool in_range(const Tensor& ids_N, const Tensor& counts_S, const Tensor& rows_S) {
  const Checks check("in_range");
  check.dense("ids", ids_N, {at::kInt, at::kLong});
  check.dense("counts", counts_S, {at::kLong});
  check.dense("rows", rows_S, {at::kLong});
  check.length("rows", rows_S.numel(), counts_S.numel());
  check.length("ids", ids_N.numel(), check.sum("counts", as_array(counts_S)));
  const int64_t* counts = counts_S.const_data_ptr<int64_t>();
  const int64_t* rows = rows_S.const_data_ptr<int64_t>();
  const auto all = [&](const auto* ids) {
    using Id = std::decay_t<decltype(*ids)>;
    bool good = true;
    for (int64_t s = 0; s < counts_S.numel(); ids += counts[s], ++s) {
      const int64_t most = std::numeric_limits<Id>::max();
      good &= rows[s] > 0 ? all_below(ids, counts[s], static_cast<Id>(std::min(rows[s], most)))
                          : counts[s] == 0;
    }
    return good;
  };
  return ids_N.scalar_type() == at::kInt ? all(ids_N.const_data_ptr<int32_t>())
                                         : all(ids_N.const_data_ptr<int64_t>());
}

} // namespace
