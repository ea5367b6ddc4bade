// Equal bags, and what is asked of owners that pool them; see exchange/distinct_bags.py and
// exchange/bag_routing.py.
#pragma once

#include "checks.h"

#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <cstring>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

namespace {

// A bag in the table of bags that were seen: part of its hash, and its number, from 1; 0 is empty.
struct BagSlot {
  uint32_t tag = 0;
  int32_t number = 0;
};

struct BagTable {
  std::vector<BagSlot> slots;
  int shift = 0;
  size_t last = 0; // distinct bags of the last batch

  void resize(int bits) {
    slots.assign(size_t{1} << bits, BagSlot{});
    shift = 64 - bits;
  }

  size_t home(uint64_t hash) const { return hash >> shift; }
};

// Multilinear, of table, ids and weights: products do not wait for each other.  Factors are powers,
// not numbers at equal distances, of which the first and the third make twice the second: small ids
// such as (4, 5, 4) and (5, 3, 5) would have equal hashes.  Equal hashes are compared in full.
template <typename Id>
INLINED inline uint64_t hash_bag(const Id* ids, const float* weights, int64_t length,
                                 uint64_t table) {
  constexpr uint64_t kStep = 0xD1342543DE82EF95ull, kMore = 0x632BE59BD9B4E019ull;
  uint64_t factor = 0x9E3779B97F4A7C15ull;
  uint64_t hash = table * factor + static_cast<uint64_t>(length);
  for (int64_t i = 0; i < length; ++i) {
    factor *= kStep;
    hash += (static_cast<uint64_t>(ids[i]) + kMore) * factor;
  }
  if (weights) {
    for (int64_t i = 0; i < length; ++i) {
      uint32_t bits;
      std::memcpy(&bits, weights + i, sizeof bits);
      factor *= kStep;
      hash += (static_cast<uint64_t>(bits) + kMore) * factor;
    }
  }
  hash ^= hash >> 32;
  hash *= 0x9E3779B97F4A7C15ull;
  return hash ^ (hash >> 29);
}

// Bags that were numbered so far: where their ids lie, and of which table they are.
struct Numbered {
  std::vector<int64_t> start;
  std::vector<uint64_t> hash;
  std::vector<int32_t> length, table;

  void clear() {
    hash.clear();
    start.clear();
    length.clear();
    table.clear();
  }

  void add(int64_t at, int32_t ids, int32_t of_table, uint64_t of_bag) {
    hash.push_back(of_bag);
    start.push_back(at);
    length.push_back(ids);
    table.push_back(of_table);
  }
};

// Bags that look for equal ones, with their hashes, slot after slot: one pass over the ids, so that
// the next one can ask for memory ahead of its use.
template <typename Id>
FOR_THIS_CPU void hash_bags(const Id* ids, const int32_t* lengths, const float* weights,
                            int64_t bags, int32_t table, uint64_t* hashes) {
  for (int64_t b = 0; b < bags; ++b) {
    hashes[b] = hash_bag(ids, weights, lengths[b], table);
    ids += lengths[b];
    weights = weights ? weights + lengths[b] : nullptr;
  }
}

FOR_THIS_CPU int64_t sum_of(const int32_t* lengths, int64_t bags) {
  int64_t sum = 0;
  for (int64_t b = 0; b < bags; ++b) {
    sum += lengths[b];
  }
  return sum;
}

// Which bags of a slot tell whether its bags repeat: a sixteenth of them, but at least 128 or half of
// them, in runs of four that are spread over the slot; all of 32 bags or fewer.  Runs find what repeats at once, as in a session; their
// places are irregular, so that they find what repeats at almost any distance.  The same as
// `_sampled` of exchange/distinct_bags.py.
struct Sample {
  static constexpr int64_t kRun = 4;
  static constexpr uint32_t kSeed = 185; // halves, thirds and quarters of common sizes are found
  int64_t bags, runs, run; // run: bags of each

  explicit Sample(int64_t bags) : bags(bags) {
    const int64_t least = bags <= 32 ? 32 : std::min<int64_t>(bags / 2, 128);
    runs = std::max<int64_t>(bags / 16, least) / kRun;
    run = kRun;
    if (is_all()) {
      runs = 1;
      run = bags;
    }
  }

  bool is_all() const { return runs * run >= bags; }
  int64_t size() const { return runs * run; }

  int64_t first(int64_t r) const {
    uint32_t mixed = static_cast<uint32_t>(r + kSeed) * 0x85EBCA6Bu;
    mixed = (mixed ^ (mixed >> 15)) * 0xC2B2AE35u;
    const int64_t room = bags / runs - run + 1;
    return r * bags / runs + (mixed >> 16) % room;
  }
};

// Whether at least a share `worth` of the bags of a slot seems to repeat, by the hashes of a sample.
// If a sample of n / k of n bags finds so many repeats, about k times their share of n bags repeats,
// as chance has it.
template <typename Id>
bool seems_to_repeat(const Id* ids, const int32_t* lengths, const float* weights, int64_t bags,
                     double worth) {
  thread_local std::vector<uint64_t> kept_hashes, kept_seen;
  std::vector<uint64_t>&hashes = kept_hashes, &seen = kept_seen;
  const Sample sample(bags);
  hashes.resize(std::max<size_t>(hashes.size(), sample.run));
  int bits = 1;
  while ((int64_t{1} << bits) < 2 * sample.size()) {
    ++bits;
  }
  seen.assign(size_t{1} << bits, 0);
  int64_t repeats = 0, at = 0, bag = 0;
  for (int64_t r = 0; r < sample.runs; ++r) {
    const int64_t first = sample.first(r);
    at += sum_of(lengths + bag, first - bag);
    bag = first;
    hash_bags(ids + at, lengths + bag, weights ? weights + at : nullptr, sample.run, 0,
              hashes.data());
    for (int64_t b = 0; b < sample.run; ++b) {
      if (lengths[bag + b] == 0) {
        continue;
      }
      const uint64_t hash = hashes[b] | 1; // 0 is an empty place
      size_t place = hash >> (64 - bits);
      while (seen[place] != 0 && seen[place] != hash) {
        place = (place + 1) & (seen.size() - 1);
      }
      repeats += seen[place] == hash;
      seen[place] = hash;
    }
  }
  const double tried = static_cast<double>(sample.size());
  return static_cast<double>(repeats) * bags >= worth * tried * tried;
}

template <typename Id>
void number_bags(const Id* ids, const int32_t* lengths, const float* weights,
                 at::IntArrayRef bags_S, const int64_t* tables, const bool* looks, double worth,
                 int32_t* number, int64_t* counts_3S, Numbered& numbered) {
  thread_local BagTable kept; // no allocation in later batches
  BagTable& seen = kept;
  int bits = 10;
  while ((size_t{1} << bits) < seen.last * 3) {
    ++bits;
  }
  seen.resize(bits);
  thread_local std::vector<uint64_t> kept_hashes;
  std::vector<uint64_t>& hashes = kept_hashes;
  std::vector<uint64_t>& hash_of = numbered.hash;
  size_t used = 0;
  int64_t at = 0;
  const int64_t slots = static_cast<int64_t>(bags_S.size());
  for (int64_t s = 0; s < slots; ++s) {
    const int32_t table = static_cast<int32_t>(tables[s]);
    const int64_t bags = bags_S[s];
    const size_t before = numbered.start.size();
    int64_t filled = 0;
    const float* slot_weights = weights ? weights + at : nullptr;
    const bool looking =
        looks[s] && (Sample(bags).is_all() ||
                     seems_to_repeat(ids + at, lengths, slot_weights, bags, worth));
    if (looking) {
      hashes.resize(std::max<size_t>(hashes.size(), bags));
      hash_bags(ids + at, lengths, slot_weights, bags, table, hashes.data());
    }
    for (int64_t b = 0; b < bags; ++b) {
      const int32_t length = lengths[b];
      if (length == 0) {
        number[b] = -1;
        continue;
      }
      ++filled;
      if (!looking) {
        number[b] = static_cast<int32_t>(numbered.start.size());
        numbered.add(at, length, table, 0);
        at += length;
        continue;
      }
      if (b + kAhead < bags) {
        __builtin_prefetch(seen.slots.data() + seen.home(hashes[b + kAhead]), 1);
      }
      const float* own_weights = weights ? weights + at : nullptr;
      const uint64_t own_hash = hashes[b];
      const uint32_t tag = static_cast<uint32_t>(own_hash);
      const size_t mask = seen.slots.size() - 1;
      size_t place = seen.home(own_hash);
      int32_t match = -1;
      for (; seen.slots[place].number != 0; place = (place + 1) & mask) {
        if (seen.slots[place].tag != tag) {
          continue;
        }
        const int32_t other = seen.slots[place].number - 1;
        if (numbered.table[other] == table && numbered.length[other] == length &&
            std::memcmp(ids + numbered.start[other], ids + at, length * sizeof(Id)) == 0 &&
            (!weights || std::memcmp(weights + numbered.start[other], own_weights,
                                     length * sizeof(float)) == 0)) {
          match = other;
          break;
        }
      }
      if (match < 0) {
        match = static_cast<int32_t>(numbered.start.size());
        numbered.add(at, length, table, own_hash);
        seen.slots[place] = {tag, match + 1};
        if (++used > seen.slots.size() / 2) {
          seen.resize(66 - seen.shift);
          const size_t wider = seen.slots.size() - 1;
          for (size_t g = 0; g < numbered.start.size(); ++g) {
            if (hash_of[g] == 0) {
              continue; // of a slot that does not look; or it will not be found, which is harmless
            }
            size_t to = seen.home(hash_of[g]);
            while (seen.slots[to].number != 0) {
              to = (to + 1) & wider;
            }
            seen.slots[to] = {static_cast<uint32_t>(hash_of[g]), static_cast<int32_t>(g + 1)};
          }
        }
      }
      number[b] = match;
      at += length;
    }
    lengths += bags;
    number += bags;
    counts_3S[s] = static_cast<int64_t>(numbered.start.size() - before);
    counts_3S[slots + s] = 0;
    for (size_t g = before; g < numbered.start.size(); ++g) {
      counts_3S[slots + s] += numbered.length[g];
    }
    counts_3S[2 * slots + s] = filled;
  }
  seen.last = used;
}

// Returns which slots had better look for equal bags, as `distinct_bags` decides it for those with
// more bags than a sample.
template <typename Id>
void find_repeating(const Id* ids, const int32_t* lengths, const float* weights,
                    at::IntArrayRef bags_S, double worth, bool* looks) {
  for (size_t s = 0; s < bags_S.size(); ++s) {
    looks[s] = looks[s] && seems_to_repeat(ids, lengths, weights, bags_S[s], worth);
    const int64_t in_slot = sum_of(lengths, bags_S[s]);
    ids += in_slot;
    weights = weights ? weights + in_slot : nullptr;
    lengths += bags_S[s];
  }
}

// The lengths of all bags, which are as many as the bags of all slots; returns how many ids they have.
inline int64_t check_lengths(const Checks& check, const Tensor& lengths_B, at::IntArrayRef bags_S) {
  check.dense("lengths", lengths_B, {at::kInt});
  check.length("lengths", lengths_B.numel(), check.sum("bags", bags_S));
  const int32_t* lengths = lengths_B.const_data_ptr<int32_t>();
  check.that(largest_unsigned(lengths, lengths_B.numel()) <= std::numeric_limits<int32_t>::max(),
             "lengths must be at least 0");
  return sum_of(lengths, lengths_B.numel());
}

Tensor repeating_slots(const Tensor& ids_N, const Tensor& lengths_B,
                       const std::optional<Tensor>& weights_N, at::IntArrayRef bags_S,
                       const Tensor& looks_S, double worth) {
  const Checks check("repeating_slots");
  check.dense("ids", ids_N, {at::kInt, at::kLong});
  check.dense("looks", looks_S, {at::kBool});
  check.length("looks", looks_S.numel(), static_cast<int64_t>(bags_S.size()));
  const int64_t total = check_lengths(check, lengths_B, bags_S);
  check.length("ids", ids_N.numel(), total);
  if (weights_N) {
    check.dense("weights", *weights_N, {at::kFloat});
    check.length("weights", weights_N->numel(), total);
  }
  Tensor repeating_S = looks_S.clone();
  const float* weights = weights_N ? weights_N->const_data_ptr<float>() : nullptr;
  const auto find = [&](const auto* ids) {
    find_repeating(ids, lengths_B.const_data_ptr<int32_t>(), weights, bags_S, worth,
                   repeating_S.mutable_data_ptr<bool>());
  };
  ids_N.scalar_type() == at::kInt ? find(ids_N.const_data_ptr<int32_t>())
                                  : find(ids_N.const_data_ptr<int64_t>());
  return repeating_S;
}

// Numbers the bags of all slots: bags of one table with the same ids, in the same order and with
// the same weights, have the same number, where a slot looks for them; empty bags have -1.  A slot
// does not look if less than a share `worth` of its bags seems to repeat.  Numbers
// go up in the order of first occurrence.  Returns the number of each bag; length, ids and weights of
// the distinct ones; and for each slot how many are first seen there, how many ids these have, and
// how many bags are not empty.
std::tuple<Tensor, Tensor, Tensor, std::optional<Tensor>, Tensor> distinct_bags(
    const Tensor& ids_N, const Tensor& lengths_B, const std::optional<Tensor>& weights_N,
    at::IntArrayRef bags_S, const Tensor& tables_S, const Tensor& looks_S, double worth) {
  const Checks check("distinct_bags");
  check.dense("ids", ids_N, {at::kInt, at::kLong});
  check.dense("tables", tables_S, {at::kLong});
  check.dense("looks", looks_S, {at::kBool});
  const int64_t total = check_lengths(check, lengths_B, bags_S);
  const int64_t slots = static_cast<int64_t>(bags_S.size()), bags = lengths_B.numel();
  check.length("tables", tables_S.numel(), slots);
  check.length("looks", looks_S.numel(), slots);
  check.that(bags < std::numeric_limits<int32_t>::max(), "bags must be fewer than 2^31");
  const int32_t* lengths = lengths_B.const_data_ptr<int32_t>();
  check.length("ids", ids_N.numel(), total);
  if (weights_N) {
    check.dense("weights", *weights_N, {at::kFloat});
    check.length("weights", weights_N->numel(), total);
  }
  const auto ints = lengths_B.options();
  Tensor number_B = at::empty({bags}, ints);
  Tensor counts_3S = at::empty({3, slots}, tables_S.options());
  thread_local Numbered kept;
  Numbered& numbered = kept;
  numbered.clear();
  const float* weights = weights_N ? weights_N->const_data_ptr<float>() : nullptr;
  const auto number = [&](const auto* ids) {
    number_bags(ids, lengths, weights, bags_S, tables_S.const_data_ptr<int64_t>(),
                looks_S.const_data_ptr<bool>(), worth, number_B.mutable_data_ptr<int32_t>(),
                counts_3S.mutable_data_ptr<int64_t>(), numbered);
  };
  const bool narrow = ids_N.scalar_type() == at::kInt;
  narrow ? number(ids_N.const_data_ptr<int32_t>()) : number(ids_N.const_data_ptr<int64_t>());

  const int64_t distinct = static_cast<int64_t>(numbered.start.size());
  Tensor lengths_G = at::empty({distinct}, ints);
  std::copy_n(numbered.length.data(), distinct, lengths_G.mutable_data_ptr<int32_t>());
  int64_t ids_left = 0;
  for (int64_t g = 0; g < distinct; ++g) {
    ids_left += numbered.length[g];
  }
  if (ids_left == total) { // nothing repeats: the ids are in order already
    return {number_B, lengths_G, ids_N, weights_N, counts_3S};
  }
  const auto taken = [&](const auto* values, auto* out) {
    for (int64_t g = 0; g < distinct; ++g) {
      out = std::copy_n(values + numbered.start[g], numbered.length[g], out);
    }
  };
  Tensor ids_M = at::empty({ids_left}, ids_N.options());
  narrow ? taken(ids_N.const_data_ptr<int32_t>(), ids_M.mutable_data_ptr<int32_t>())
         : taken(ids_N.const_data_ptr<int64_t>(), ids_M.mutable_data_ptr<int64_t>());
  std::optional<Tensor> weights_M;
  if (weights_N) {
    weights_M = at::empty({ids_left}, weights_N->options());
    taken(weights, weights_M->mutable_data_ptr<float>());
  }
  return {number_B, lengths_G, ids_M, weights_M, counts_3S};
}

// The shards of the table of each slot: columns on one rank, as a table in a bucket of it.
struct Shards {
  const int64_t *ends, *bucket, *owner, *first_row; // by slot; by shard, slot after slot

  INLINED int64_t begin(int64_t slot) const { return slot == 0 ? 0 : ends[slot - 1]; }
};

// What is asked of owners.  A unit is a distinct bag and a shard of its table; units are numbered
// bucket after bucket, owner after owner.  Returns the distinct bag of each unit, the first row of
// its shard, units and ids of each bucket and owner, the numbers of units in their bucket, distinct
// bag after distinct bag and shard after shard, and where those of each distinct bag begin.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> bag_units(
    const Tensor& lengths_G, const Tensor& distinct_S, const Tensor& ends_S, const Tensor& shards_3X,
    int64_t buckets, int64_t ranks) {
  const Checks check("bag_units");
  check.dense("lengths", lengths_G, {at::kInt});
  check.dense("distinct", distinct_S, {at::kLong});
  check.dense("ends", ends_S, {at::kLong});
  check.dense("shards", shards_3X, {at::kLong});
  check.is_matrix("shards", shards_3X);
  const int64_t slots = distinct_S.numel(), shards = shards_3X.size(1);
  check.length("ends", ends_S.numel(), slots);
  check.length("lengths", lengths_G.numel(), check.sum("distinct", as_array(distinct_S)));
  const int64_t* all = shards_3X.const_data_ptr<int64_t>();
  check.length("shards", shards_3X.size(0), 3);
  check.below("buckets of shards", all, shards, buckets);
  check.below("owners of shards", all + shards, shards, ranks);
  const Shards of{ends_S.const_data_ptr<int64_t>(), all, all + shards, all + 2 * shards};
  check.below("ends", of.ends, slots, shards + 1);
  const int32_t* lengths = lengths_G.const_data_ptr<int32_t>();
  const int64_t* distinct = distinct_S.const_data_ptr<int64_t>();

  Tensor units_KW = at::zeros({buckets, ranks}, ends_S.options());
  Tensor ids_KW = at::zeros({buckets, ranks}, ends_S.options());
  int64_t* units = units_KW.mutable_data_ptr<int64_t>();
  int64_t* ids = ids_KW.mutable_data_ptr<int64_t>();
  int64_t total = 0, g = 0;
  for (int64_t s = 0; s < slots; ++s) {
    check.that(of.begin(s) <= of.ends[s], "ends must not descend");
    int64_t in_slot = 0;
    for (int64_t i = 0; i < distinct[s]; ++i) {
      in_slot += lengths[g + i];
    }
    for (int64_t x = of.begin(s); x < of.ends[s]; ++x) {
      units[of.bucket[x] * ranks + of.owner[x]] += distinct[s];
      ids[of.bucket[x] * ranks + of.owner[x]] += in_slot;
      total += distinct[s];
    }
    g += distinct[s];
  }
  // Where the units of each bucket and owner begin, among all and in their bucket.
  std::vector<int64_t> cursor(buckets * ranks), bucket_start(buckets);
  int64_t next = 0;
  for (int64_t k = 0; k < buckets; ++k) {
    bucket_start[k] = next;
    for (int64_t r = 0; r < ranks; ++r) {
      cursor[k * ranks + r] = next;
      next += units[k * ranks + r];
    }
  }
  const auto ints = lengths_G.options();
  Tensor bag_U = at::empty({total}, ints), first_row_U = at::empty({total}, ints);
  Tensor unit_X = at::empty({total}, ints), place_G = at::empty(lengths_G.sizes(), ints);
  int32_t* bag = bag_U.mutable_data_ptr<int32_t>();
  int32_t* first_row = first_row_U.mutable_data_ptr<int32_t>();
  int32_t* unit = unit_X.mutable_data_ptr<int32_t>();
  int32_t* place = place_G.mutable_data_ptr<int32_t>();
  g = 0;
  for (int64_t s = 0; s < slots; ++s) {
    for (const int64_t end = g + distinct[s]; g < end; ++g) {
      place[g] = static_cast<int32_t>(unit - unit_X.const_data_ptr<int32_t>());
      for (int64_t x = of.begin(s); x < of.ends[s]; ++x) {
        const int64_t at = cursor[of.bucket[x] * ranks + of.owner[x]]++;
        bag[at] = static_cast<int32_t>(g);
        first_row[at] = static_cast<int32_t>(of.first_row[x]);
        *unit++ = static_cast<int32_t>(at - bucket_start[of.bucket[x]]);
      }
    }
  }
  return {bag_U, first_row_U, units_KW, ids_KW, unit_X, place_G};
}

// The unit that each cell of a bucket's output shows; `empty` where the bag has no ids.  A cell is a
// bag and a shard.  Cells are in the order (sample, slot, shard), or (slot, sample, shard) if they do
// not lie side by side.
Tensor bag_cells(const Tensor& number_B, at::IntArrayRef bags_S, at::IntArrayRef shards_S,
                 const Tensor& unit_place_G, const Tensor& unit_X, int64_t empty,
                 bool side_by_side) {
  const Checks check("bag_cells");
  check.dense("numbers", number_B, {at::kInt});
  check.dense("unit_places", unit_place_G, {at::kInt});
  check.dense("units", unit_X, {at::kInt});
  const int64_t slots = static_cast<int64_t>(bags_S.size());
  check.length("shards", shards_S.size(), slots);
  check.length("numbers", number_B.numel(), check.sum("bags", bags_S));
  const int64_t width = check.sum("shards", shards_S);
  check.product("cells", width, number_B.numel());
  int64_t cells = 0;
  for (int64_t s = 0; s < slots; ++s) {
    check.at_least("shards", shards_S[s], 1);
    check.that(!side_by_side || bags_S[s] == bags_S[0], "bags must be equally many side by side");
    cells += shards_S[s] * bags_S[s];
  }
  Tensor cell = at::empty({cells}, number_B.options());
  const int32_t* number = number_B.const_data_ptr<int32_t>();
  const int32_t* unit = unit_X.const_data_ptr<int32_t>();
  const int32_t* place = unit_place_G.const_data_ptr<int32_t>();
  const int64_t distinct = unit_place_G.numel(), units = unit_X.numel();
  bool outside = false;
  int64_t column = 0;
  int32_t* out = cell.mutable_data_ptr<int32_t>();
  for (int64_t s = 0; s < slots; ++s) {
    const int64_t shards = shards_S[s], step = side_by_side ? width : shards;
    int32_t* target = side_by_side ? out + column : out;
    for (int64_t b = 0; b < bags_S[s]; ++b, ++number, target += step) {
      const bool filled = *number >= 0;
      if (filled && (*number >= distinct || place[*number] < 0 ||
                     place[*number] > units - shards)) {
        outside = true;
        break;
      }
      for (int64_t c = 0; c < shards; ++c) {
        target[c] = filled ? unit[place[*number] + c] : static_cast<int32_t>(empty);
      }
    }
    column += shards;
    out += side_by_side ? 0 : shards * bags_S[s];
    if (outside) {
      break;
    }
  }
  check.that(!outside, "every number must be that of a distinct bag with units");
  return cell;
}

// Writes what is asked of owners: for each of them, bucket after bucket, the lengths of its units,
// their rows and, if there are weights, those, from element starts[owner] of the words on.
void pack_bags(const Tensor& rows_M, const Tensor& lengths_G, const std::optional<Tensor>& weights_M,
               const Tensor& bag_U, const Tensor& first_row_U, const Tensor& units_KW,
               const Tensor& ids_KW, at::IntArrayRef starts_W, Tensor words) {
  const Checks check("pack_bags");
  check.dense("rows", rows_M, {at::kInt, at::kLong});
  check.dense("lengths", lengths_G, {at::kInt});
  check.dense("bags", bag_U, {at::kInt});
  check.dense("first_rows", first_row_U, {at::kInt});
  check.dense("units", units_KW, {at::kLong});
  check.dense("ids", ids_KW, {at::kLong});
  check.dense("words", words, {at::kInt});
  check.is_matrix("units", units_KW);
  const int64_t buckets = units_KW.size(0), ranks = units_KW.size(1);
  check.length("starts", starts_W.size(), ranks);
  check.that(ids_KW.sizes() == units_KW.sizes(), "ids and units must have the same shape");
  check.length("bags", bag_U.numel(), check.sum("units", as_array(units_KW)));
  check.length("first_rows", first_row_U.numel(), bag_U.numel());
  check.below("bags", bag_U.const_data_ptr<int32_t>(), bag_U.numel(), lengths_G.numel());
  if (weights_M) {
    check.dense("weights", *weights_M, {at::kFloat});
    check.length("weights", weights_M->numel(), rows_M.numel());
  }
  const int32_t* lengths = lengths_G.const_data_ptr<int32_t>();
  std::vector<int64_t> start_G(lengths_G.numel() + 1, 0);
  for (int64_t g = 0; g < lengths_G.numel(); ++g) {
    check.that(lengths[g] >= 0, "lengths must be at least 0");
    start_G[g + 1] = start_G[g] + lengths[g];
  }
  check.length("rows", rows_M.numel(), start_G.back());
  const int64_t* units = units_KW.const_data_ptr<int64_t>();
  const int64_t* ids = ids_KW.const_data_ptr<int64_t>();
  std::vector<int64_t> at(starts_W.begin(), starts_W.end());
  const int32_t* bag = bag_U.const_data_ptr<int32_t>();
  const int32_t* first_row = first_row_U.const_data_ptr<int32_t>();
  const float* weights = weights_M ? weights_M->const_data_ptr<float>() : nullptr;
  int32_t* out = words.mutable_data_ptr<int32_t>();
  const auto write = [&](const auto* rows) {
    for (int64_t k = 0; k < buckets; ++k) {
      for (int64_t r = 0; r < ranks; ++r) {
        const int64_t count = units[k * ranks + r], in_units = ids[k * ranks + r];
        const int64_t size = count + in_units * (weights ? 2 : 1);
        check.that(at[r] >= 0 && in_units >= 0 && size <= words.numel() - at[r],
                   "the words of owner ", r, " do not fit");
        int32_t* length_out = out + at[r];
        int32_t* row_out = length_out + count;
        int32_t* weight_out = row_out + in_units;
        int64_t left = in_units;
        for (int64_t u = 0; u < count; ++u, ++bag, ++first_row) {
          const int32_t length = lengths[*bag];
          const auto* own = rows + start_G[*bag];
          check.that((left -= length) >= 0, "ids are fewer than the units have");
          *length_out++ = length;
          for (int32_t i = 0; i < length; ++i) {
            row_out[i] = static_cast<int32_t>(own[i]) + *first_row;
          }
          row_out += length;
          if (weights) {
            std::memcpy(weight_out, weights + start_G[*bag], length * sizeof(float));
            weight_out += length;
          }
        }
        check.that(left == 0, "ids are more than the units have");
        at[r] += size;
      }
    }
  };
  rows_M.scalar_type() == at::kInt ? write(rows_M.const_data_ptr<int32_t>())
                                   : write(rows_M.const_data_ptr<int64_t>());
}

} // namespace
