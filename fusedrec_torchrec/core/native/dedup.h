// Keys to unique keys, grouped by part, and the inverse; see exchange/dedup.py and hot/index.py.
#pragma once

#include "checks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <bit>
#include <optional>
#include <tuple>
#include <vector>

namespace {

template <typename Key>
struct Slot {
  Key key = 0;
  int32_t number = 0; // of the key, from 1; 0 is empty
};

inline size_t home(uint64_t key, int shift) {
  return (key * 0x9E3779B97F4A7C15ull) >> shift;
}

template <typename Key>
inline Slot<Key>* find(Slot<Key>* slots, size_t mask, int shift, Key key) {
  size_t at = home(key, shift);
  while (slots[at].number != 0 && slots[at].key != key) {
    at = (at + 1) & mask;
  }
  return slots + at;
}

// Numbers keys 0, 1, 2, ... in order of first occurrence: a hash table with open addressing and
// linear probing, and the keys it holds.  The table is as large as the unique keys of the last batch
// need, so that it stays in cache, and grows if this batch has more.
template <typename Key>
struct Numbering {
  std::vector<Slot<Key>> slots;
  std::vector<Key> keys;
  int bits = 12, shift = 64 - 12; // a key's home is the top bits of its hash

  void begin() {
    bits = 12;
    while ((size_t{1} << bits) < keys.size() * 4) {
      ++bits;
    }
    resize();
    keys.clear();
  }

  void resize() {
    slots.assign(size_t{1} << bits, Slot<Key>{});
    shift = 64 - bits;
  }

  void add(const Key* added, int64_t count, int32_t* numbers) {
    size_t used = keys.size();
    keys.resize(used + count);
    // Local copies: the compiler cannot know that writing to numbers leaves the members alone.
    Slot<Key>* table = slots.data();
    Key* unique = keys.data();
    size_t mask = slots.size() - 1, limit = slots.size() / 2;
    int top = shift;
    for (int64_t i = 0; i < count; ++i) {
      if (i + kAhead < count) {
        __builtin_prefetch(table + home(added[i + kAhead], top), 1);
      }
      Slot<Key>* slot = find(table, mask, top, added[i]);
      if (slot->number == 0) {
        unique[used++] = added[i];
        *slot = {added[i], static_cast<int32_t>(used)};
      }
      numbers[i] = slot->number - 1;
      if (used > limit) {
        bits += 2;
        resize();
        table = slots.data();
        top = shift;
        mask = slots.size() - 1;
        limit = slots.size() / 2;
        for (size_t u = 0; u < used; ++u) {
          *find(table, mask, top, unique[u]) = {unique[u], static_cast<int32_t>(u + 1)};
        }
      }
    }
    keys.resize(used);
  }
};

// Hot rows: a hash table of their keys, and the keys of their replicas.  Every slot is a pair
// (key, key of the replica); the key is -1 in an empty one.
template <typename Key>
struct HotTable {
  const Key* slots = nullptr;
  size_t mask = 0;
  int shift = 0;

  explicit HotTable(const std::optional<Tensor>& table) {
    if (table) {
      slots = table->const_data_ptr<Key>();
      mask = table->size(0) - 1;
      shift = 64 - __builtin_ctzll(table->size(0));
    }
  }

  // The key of the replica; the key itself if the row is not hot.
  Key operator()(Key key) const {
    if (slots == nullptr) {
      return key;
    }
    size_t at = home(key, shift);
    for (size_t probe = 0; probe <= mask && slots[2 * at] != -1; ++probe) {
      if (slots[2 * at] == key) {
        return slots[2 * at + 1];
      }
      at = (at + 1) & mask;
    }
    return key;
  }
};

template <typename Key>
Tensor build_hot_table(const Tensor& keys_H, const Tensor& replicas_H) {
  int bits = 4;
  while ((int64_t{1} << bits) < keys_H.numel() * 2) {
    ++bits;
  }
  Tensor table = at::full({int64_t{1} << bits, 2}, -1, keys_H.options());
  Key* slots = table.mutable_data_ptr<Key>();
  const size_t mask = (size_t{1} << bits) - 1;
  const Checks check("hot_table");
  for (int64_t h = 0; h < keys_H.numel(); ++h) {
    const Key key = keys_H.const_data_ptr<Key>()[h];
    check.at_least("a key", key, 0); // -1 is the mark of an empty slot
    size_t at = home(key, 64 - bits);
    while (slots[2 * at] != -1) {
      at = (at + 1) & mask;
    }
    slots[2 * at] = key;
    slots[2 * at + 1] = replicas_H.const_data_ptr<Key>()[h];
  }
  return table;
}

Tensor hot_table(const Tensor& keys_H, const Tensor& replicas_H) {
  const Checks check("hot_table");
  check.dense("keys", keys_H, {at::kInt, at::kLong});
  check.dense("replicas", replicas_H, {keys_H.scalar_type()});
  check.length("replicas", replicas_H.numel(), keys_H.numel());
  return keys_H.scalar_type() == at::kInt ? build_hot_table<int32_t>(keys_H, replicas_H)
                                          : build_hot_table<int64_t>(keys_H, replicas_H);
}

// Groups unique keys by part, in order of first occurrence within a part; keys of hot rows become
// those of their replicas.  Returns the keys and how many each part has; `place` says where each of
// the keys that came in is now.
template <typename Key>
std::tuple<Tensor, Tensor> group_by_part(const Checks& check, std::vector<Key>& unique,
                                         const Tensor& part_starts_P1,
                                         const std::optional<Tensor>& table,
                                         std::vector<int32_t>& place) {
  const HotTable<Key> replica(table);
  const int64_t parts = part_starts_P1.numel() - 1;
  const Key* starts = part_starts_P1.const_data_ptr<Key>();
  check.that(std::is_sorted(starts, starts + parts + 1), "part_starts must not descend");
  Tensor counts_P = at::zeros({parts}, part_starts_P1.options().dtype(at::kLong));
  int64_t* counts = counts_P.mutable_data_ptr<int64_t>();
  place.resize(unique.size());
  bool outside = false;
  for (size_t u = 0; u < unique.size(); ++u) {
    if (replica.slots && u + kAhead < unique.size()) {
      __builtin_prefetch(replica.slots + 2 * home(unique[u + kAhead], replica.shift));
    }
    unique[u] = replica(unique[u]);
    outside |= unique[u] < starts[0] || unique[u] >= starts[parts];
    const Key* next = std::upper_bound(starts + 1, starts + parts, unique[u]);
    place[u] = static_cast<int32_t>(next - starts - 1);
    ++counts[place[u]];
  }
  check.that(!outside, "keys and those of replicas must be in [", starts[0], ", ", starts[parts],
             ")");
  std::vector<int32_t> cursor(parts, 0);
  for (int64_t p = 1; p < parts; ++p) {
    cursor[p] = cursor[p - 1] + static_cast<int32_t>(counts[p - 1]);
  }
  Tensor keys_U = at::empty({static_cast<int64_t>(unique.size())}, part_starts_P1.options());
  Key* grouped = keys_U.mutable_data_ptr<Key>();
  for (size_t u = 0; u < unique.size(); ++u) {
    place[u] = cursor[place[u]]++;
    grouped[place[u]] = unique[u];
  }
  return {keys_U, counts_P};
}

// The part starts are of a key type, and the table of hot rows is one of keys of that type.
void check_parts(const Checks& check, const Tensor& part_starts_P1,
                 const std::optional<Tensor>& table) {
  check.dense("part_starts", part_starts_P1, {at::kInt, at::kLong});
  check.at_least("the number of part_starts", part_starts_P1.numel(), 2);
  if (table) {
    check.dense("hot_table", *table, {part_starts_P1.scalar_type()});
    check.is_matrix("hot_table", *table);
    check.that(table->size(0) >= 2 && std::has_single_bit(static_cast<uint64_t>(table->size(0))) &&
                   table->size(1) == 2,
               "hot_table must be a power of two of pairs, not of shape ", table->sizes());
  }
}

} // namespace
