// Ids to keys of the fused key space; see exchange/keys.py.
#pragma once

#include "checks.h"

#include <limits>
#include <type_traits>

namespace {

// How the ids of a slot become keys: rank r owns the rows of its table from starts[r] on, and the
// key of a row there is id + shifts[r].
struct SlotKeys {
  int64_t rows, ranks;
  const int64_t *starts, *shifts;

  // Returns whether any id is outside of the table; keys mean nothing then.
  template <typename Id, typename Key>
  bool fill(const Id* ids, int64_t count, Key* keys) const {
    bool bad = false;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t id = ids[i];
      bad |= static_cast<uint64_t>(id) >= static_cast<uint64_t>(rows);
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
    return bad;
  }
};

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
