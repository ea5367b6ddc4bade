// Ids to the distinct rows that they ask for; see exchange/row_numbers.py.
#pragma once

#include "checks.h"
#include "dedup.h"
#include "keys.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <limits>
#include <optional>
#include <tuple>
#include <vector>

namespace {

// The bags of consecutive slots, which come slot after slot and go sample after sample.
struct Transposed {
  const int32_t* lengths;
  int64_t slots, batch;

  bool all_of_one() const {
    int32_t other = 0;  // not std::all_of, which compilers do not vectorize
    for (int64_t i = 0; i < slots * batch; ++i) {
      other |= lengths[i] ^ 1;
    }
    return other == 0;
  }

  Tensor offsets(const at::TensorOptions& ints) const {
    Tensor offsets_B1 = at::empty({slots * batch + 1}, ints);
    int32_t* out = offsets_B1.mutable_data_ptr<int32_t>();
    *out = 0;
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t s = 0; s < slots; ++s, ++out) {
        out[1] = out[0] + lengths[s * batch + b];
      }
    }
    return offsets_B1;
  }

  // Calls move(from, count, to) for every bag: ids from `from` on go to `to`.
  template <typename Move>
  void each(const int32_t* offsets, Move move) const {
    int64_t from = 0;
    for (int64_t s = 0; s < slots; ++s) {
      for (int64_t b = 0; b < batch; ++b) {
        const int32_t length = lengths[s * batch + b];
        move(from, length, offsets[b * slots + s]);
        from += length;
      }
    }
  }
};

template <typename Id, typename Key>
std::tuple<Tensor, Tensor, std::vector<Tensor>, Tensor, Tensor> number(
    const Checks& check, const Tensor& ids_N, const Tensor& lengths_B, at::IntArrayRef counts_S,
    const Tensor& rows_S, const Tensor& starts_SW, const Tensor& shifts_SW,
    const Tensor& part_starts_P1, const std::optional<Tensor>& table, at::IntArrayRef slot_ends_K,
    int64_t batch) {
  const int64_t total = ids_N.numel(), slots = rows_S.numel(), ranks = starts_SW.size(1);
  thread_local Numbering<Key> kept_numbering; // no allocation in later batches
  thread_local std::vector<Key> kept_keys;
  thread_local std::vector<int32_t> kept_numbers, kept_place;
  Numbering<Key>& numbering = kept_numbering;
  std::vector<int32_t>&numbers = kept_numbers, &place = kept_place;
  numbers.resize(total);
  numbering.begin();
  const Id* ids = ids_N.const_data_ptr<Id>();
  bool bad = false;
  for (int64_t s = 0, at = 0; s < slots; at += counts_S[s], ++s) {
    const SlotKeys slot{rows_S.const_data_ptr<int64_t>()[s], ranks,
                        starts_SW.const_data_ptr<int64_t>() + s * ranks,
                        shifts_SW.const_data_ptr<int64_t>() + s * ranks};
    kept_keys.resize(std::max<size_t>(kept_keys.size(), counts_S[s]));
    bad |= slot.fill(ids + at, counts_S[s], kept_keys.data());
    if (bad) {
      break;
    }
    numbering.add(kept_keys.data(), counts_S[s], numbers.data() + at);
  }
  if (bad) { // all ids ask for the first key
    numbering.begin();
    std::fill(numbers.begin(), numbers.end(), 0);
    numbering.keys.assign(total ? 1 : 0, part_starts_P1.const_data_ptr<Key>()[0]);
  }
  const auto [keys_U, counts_P] =
      group_by_part(check, numbering.keys, part_starts_P1, table, place);

  const auto ints = lengths_B.options();
  Tensor rows_N = at::empty({total}, ints);
  std::vector<Tensor> offsets;
  int32_t* out = rows_N.mutable_data_ptr<int32_t>();
  const int32_t *from = numbers.data(), *lengths = lengths_B.const_data_ptr<int32_t>();
  const int64_t buckets = static_cast<int64_t>(slot_ends_K.size());
  const int64_t owners = counts_P.numel() / buckets, *counts = counts_P.template const_data_ptr<int64_t>();
  int32_t first = 0; // of the bucket's rows
  for (int64_t k = 0, s = 0; k < buckets; ++k) {
    const int64_t own_slots = slot_ends_K[k] - s;
    int64_t own = 0;
    for (; s < slot_ends_K[k]; ++s) {
      own += counts_S[s];
    }
    if (batch == 0) {
      for (int64_t i = 0; i < own; ++i) {
        out[i] = place[from[i]] - first;
      }
    } else {
      const Transposed bags{lengths, own_slots, batch};
      lengths += own_slots * batch;
      if (own == own_slots * batch && bags.all_of_one()) {
        offsets.push_back(at::empty({0}, ints));
        for (int64_t slot = 0; slot < own_slots; ++slot) {
          for (int64_t b = 0; b < batch; ++b) {
            out[b * own_slots + slot] = place[from[slot * batch + b]] - first;
          }
        }
      } else {
        offsets.push_back(bags.offsets(ints));
        bags.each(offsets.back().template const_data_ptr<int32_t>(),
                  [&](int64_t source, int32_t length, int32_t target) {
                    for (int32_t i = 0; i < length; ++i) {
                      out[target + i] = place[from[source + i]] - first;
                    }
                  });
      }
    }
    from += own;
    out += own;
    for (int64_t o = 0; o < owners; ++o) {
      first += static_cast<int32_t>(counts[k * owners + o]);
    }
  }
  return {keys_U, rows_N, offsets, counts_P, at::full({}, bad, ids_N.options().dtype(at::kBool))};
}

// Numbers the distinct rows that the ids of a batch ask for; ids come slot after slot.
//
// Rank r owns the rows of a slot's table from starts[r] on, and key = id + shifts[r].  Buckets are
// consecutive slots, up to slot_ends.  If `batch` is 0, ids stay in order; else every slot has that
// many bags, and those of a bucket are put in the order (sample, slot).
//
// Returns the unique keys, part after part; for every id the number of its row among those of its
// bucket; if bags were put in order, where they begin, for each bucket, without elements if every bag
// has one id; how many unique keys each part has; and whether any id is outside of its table, in
// which case all ids ask for one row.
std::tuple<Tensor, Tensor, std::vector<Tensor>, Tensor, Tensor> number_rows(
    const Tensor& ids_N, const Tensor& lengths_B, at::IntArrayRef counts_S, const Tensor& rows_S,
    const Tensor& starts_SW, const Tensor& shifts_SW, const Tensor& part_starts_P1,
    const std::optional<Tensor>& table, at::IntArrayRef slot_ends_K, int64_t batch) {
  const Checks check("number_rows");
  check.dense("ids", ids_N, {at::kInt, at::kLong});
  check.dense("lengths", lengths_B, {at::kInt});
  check.dense("rows", rows_S, {at::kLong});
  check.dense("starts", starts_SW, {at::kLong});
  check.dense("shifts", shifts_SW, {at::kLong});
  check.is_matrix("starts", starts_SW);
  const int64_t slots = rows_S.numel(), buckets = static_cast<int64_t>(slot_ends_K.size());
  check.length("counts", counts_S.size(), slots);
  check.that(starts_SW.size(0) == slots && starts_SW.size(1) > 0 &&
                 shifts_SW.sizes() == starts_SW.sizes(),
             "starts and shifts must have a line for each of ", slots,
             " slots and a column for each rank, not the shapes ", starts_SW.sizes(), " and ",
             shifts_SW.sizes());
  check.length("ids", ids_N.numel(), check.sum("counts", counts_S));
  check.that(ids_N.numel() <= std::numeric_limits<int32_t>::max(), "ids must be fewer than 2^31");
  check_parts(check, part_starts_P1, table);
  check.that(buckets > 0 && std::is_sorted(slot_ends_K.begin(), slot_ends_K.end()) &&
                 slot_ends_K.front() >= 0 && slot_ends_K.back() == slots,
             "slot_ends must not descend, and end with ", slots, ", not be ", slot_ends_K);
  check.that((part_starts_P1.numel() - 1) % buckets == 0, "part_starts must be of as many parts for "
             "each of ", buckets, " buckets, not of ", part_starts_P1.numel() - 1);
  check.at_least("batch", batch, 0);
  if (batch > 0) {
    check.length("lengths", lengths_B.numel(), check.product("lengths", slots, batch));
    const int32_t* lengths = lengths_B.const_data_ptr<int32_t>();
    for (int64_t s = 0; s < slots; ++s, lengths += batch) {
      int64_t own = 0;
      int32_t signs = 0;
      for (int64_t b = 0; b < batch; ++b) {
        own += lengths[b];
        signs |= lengths[b];
      }
      check.that(signs >= 0, "lengths must be at least 0");
      check.that(own == counts_S[s], "the lengths of slot ", s, " must add up to ", counts_S[s],
                 ", not to ", own);
    }
  }
  const bool narrow_ids = ids_N.scalar_type() == at::kInt;
  const bool narrow_keys = part_starts_P1.scalar_type() == at::kInt;
  const auto run = narrow_ids ? (narrow_keys ? number<int32_t, int32_t> : number<int32_t, int64_t>)
                              : (narrow_keys ? number<int64_t, int32_t> : number<int64_t, int64_t>);
  return run(check, ids_N, lengths_B, counts_S, rows_S, starts_SW, shifts_SW, part_starts_P1, table,
             slot_ends_K, batch);
}

} // namespace
