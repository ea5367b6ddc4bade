// The hot loops of the data path on CPU, for float32 rows.  See native/__init__.py.
//
// What torch's own operators leave on the table here: dedup needs a sort, sums per row need another
// one, and bag sums cannot write into a buffer that exists already.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_THIS_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_THIS_CPU
#endif
// What such a function calls must become part of it, or it is compiled for the oldest CPU only.
#define INLINED __attribute__((always_inline))

namespace {

using at::Tensor;

constexpr int64_t kAhead = 12; // how far ahead of use memory is asked for
// Larger outputs bypass the cache.  Measured with two ranks on a cache of 32 MB, writing and then
// reading an output of 14 MB: 1.62 ms past the cache, 1.68 ms through it; the larger, the clearer.
constexpr size_t kStreamedBytes = 8 << 20;

// ---------------------------------------------------------------- keys

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
      keys[i] = static_cast<Key>(id + shifts[owner]);
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
  TORCH_CHECK(ids_N.is_contiguous() && starts_SW.is_contiguous() && shifts_SW.is_contiguous());
  const int64_t* counts = counts_S.const_data_ptr<int64_t>();
  TORCH_CHECK(std::accumulate(counts, counts + counts_S.numel(), int64_t{0}) == ids_N.numel());
  Tensor keys_N = at::empty(ids_N.sizes(), ids_N.options().dtype(key_type));
  const auto fill = [&](const auto* ids) {
    return key_type == at::kInt
        ? fill_keys(ids, counts_S, rows_S, starts_SW, shifts_SW, keys_N.mutable_data_ptr<int32_t>())
        : fill_keys(ids, counts_S, rows_S, starts_SW, shifts_SW, keys_N.mutable_data_ptr<int64_t>());
  };
  const bool bad = ids_N.scalar_type() == at::kInt ? fill(ids_N.const_data_ptr<int32_t>())
                                                   : fill(ids_N.const_data_ptr<int64_t>());
  if (bad) {
    keys_N.zero_();
  }
  return {keys_N, at::full({}, bad, ids_N.options().dtype(at::kBool))};
}

// ---------------------------------------------------------------- dedup

template <typename Key>
struct Slot {
  Key key = 0;
  int32_t number = 0; // of the key, from 1; 0 is empty
};

// A hash table with open addressing and linear probing, and the keys it holds.
template <typename Key>
struct Numbering {
  std::vector<Slot<Key>> slots;
  std::vector<Key> keys;
  int shift = 0; // a key's home is the top bits of its hash

  void resize(int bits) {
    slots.assign(size_t{1} << bits, Slot<Key>{});
    shift = 64 - bits;
  }
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

// Numbers the keys 0, 1, 2, ... in order of first occurrence.  The table is as large as the unique
// keys of the last batch need, so that it stays in cache, and grows if this batch has more.
template <typename Key>
void number_keys(const Key* keys, int64_t ids, int32_t* inverse, Numbering<Key>& numbering) {
  int bits = 12;
  while ((size_t{1} << bits) < numbering.keys.size() * 4) {
    ++bits;
  }
  numbering.resize(bits);
  numbering.keys.resize(ids);
  // Local copies: the compiler cannot know that writing to inverse leaves the members alone.
  Slot<Key>* slots = numbering.slots.data();
  Key* unique = numbering.keys.data();
  int shift = numbering.shift;
  size_t mask = numbering.slots.size() - 1, limit = numbering.slots.size() / 2;
  size_t used = 0;
  for (int64_t i = 0; i < ids; ++i) {
    if (i + kAhead < ids) {
      __builtin_prefetch(slots + home(keys[i + kAhead], shift), 1);
    }
    Slot<Key>* slot = find(slots, mask, shift, keys[i]);
    if (slot->number == 0) {
      unique[used++] = keys[i];
      *slot = {keys[i], static_cast<int32_t>(used)};
    }
    inverse[i] = slot->number - 1;
    if (used > limit) {
      bits += 2;
      numbering.resize(bits);
      slots = numbering.slots.data();
      shift = numbering.shift;
      mask = numbering.slots.size() - 1;
      limit = numbering.slots.size() / 2;
      for (size_t u = 0; u < used; ++u) {
        *find(slots, mask, shift, unique[u]) = {unique[u], static_cast<int32_t>(u + 1)};
      }
    }
  }
  numbering.keys.resize(used);
}

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
    while (slots[2 * at] != -1) {
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
  for (int64_t h = 0; h < keys_H.numel(); ++h) {
    const Key key = keys_H.const_data_ptr<Key>()[h];
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
  TORCH_CHECK(keys_H.is_contiguous() && replicas_H.is_contiguous());
  return keys_H.scalar_type() == at::kInt ? build_hot_table<int32_t>(keys_H, replicas_H)
                                          : build_hot_table<int64_t>(keys_H, replicas_H);
}

template <typename Key>
std::tuple<Tensor, Tensor, Tensor> dedup_keys(const Tensor& keys_N, const Tensor& part_starts_P1,
                                              const std::optional<Tensor>& table) {
  const int64_t ids = keys_N.numel();
  Tensor inverse_N = at::empty({ids}, keys_N.options().dtype(at::kInt));
  int32_t* inverse = inverse_N.mutable_data_ptr<int32_t>();
  thread_local Numbering<Key> kept; // no allocation in later batches
  Numbering<Key>& numbering = kept;
  number_keys(keys_N.const_data_ptr<Key>(), ids, inverse, numbering);

  // Group the unique keys by part, in order of first occurrence within a part.
  std::vector<Key>& unique = numbering.keys;
  const HotTable<Key> replica(table);
  const int64_t parts = part_starts_P1.numel() - 1;
  const Key* starts = part_starts_P1.const_data_ptr<Key>();
  Tensor counts_P = at::empty({parts}, keys_N.options().dtype(at::kLong));
  int64_t* counts = counts_P.mutable_data_ptr<int64_t>();
  std::fill(counts, counts + parts, 0);
  thread_local std::vector<int32_t> kept_place;
  std::vector<int32_t>& place = kept_place;
  place.resize(unique.size());
  for (size_t u = 0; u < unique.size(); ++u) {
    if (replica.slots && u + kAhead < unique.size()) {
      __builtin_prefetch(replica.slots + 2 * home(unique[u + kAhead], replica.shift));
    }
    unique[u] = replica(unique[u]);
    const Key* next = std::upper_bound(starts + 1, starts + parts, unique[u]);
    place[u] = static_cast<int32_t>(next - starts - 1);
    ++counts[place[u]];
  }
  std::vector<int32_t> cursor(parts, 0);
  for (int64_t p = 1; p < parts; ++p) {
    cursor[p] = cursor[p - 1] + static_cast<int32_t>(counts[p - 1]);
  }
  Tensor keys_U = at::empty({static_cast<int64_t>(unique.size())}, keys_N.options());
  Key* grouped = keys_U.mutable_data_ptr<Key>();
  for (size_t u = 0; u < unique.size(); ++u) {
    place[u] = cursor[place[u]]++;
    grouped[place[u]] = unique[u];
  }
  for (int64_t i = 0; i < ids; ++i) {
    inverse[i] = place[inverse[i]];
  }
  return {keys_U, inverse_N, counts_P};
}

std::tuple<Tensor, Tensor, Tensor> dedup(const Tensor& keys_N, const Tensor& part_starts_P1,
                                         const std::optional<Tensor>& table) {
  TORCH_CHECK(keys_N.is_contiguous() && part_starts_P1.is_contiguous());
  TORCH_CHECK(keys_N.scalar_type() == part_starts_P1.scalar_type());
  return keys_N.scalar_type() == at::kInt ? dedup_keys<int32_t>(keys_N, part_starts_P1, table)
                                          : dedup_keys<int64_t>(keys_N, part_starts_P1, table);
}

// ---------------------------------------------------------------- messages

// Writes the local rows of the unique keys into the message of their owner: messages[owner] has
// room for them from element `header` on, bucket after bucket.  If they do not all fit, nothing is
// written: all ranks take a second round then.  Owners without a message are the replicas.
void pack(const Tensor& keys_U, const Tensor& counts_KO, const Tensor& part_starts_P1,
          int64_t header, Tensor messages) {
  const int64_t buckets = counts_KO.size(0), owners = counts_KO.size(1);
  const int64_t ranks = messages.size(0), width = messages.size(1);
  TORCH_CHECK(keys_U.is_contiguous() && counts_KO.is_contiguous() && messages.is_contiguous());
  const int64_t* counts = counts_KO.const_data_ptr<int64_t>();
  std::vector<int32_t*> target(ranks);
  for (int64_t r = 0; r < ranks; ++r) {
    target[r] = messages.mutable_data_ptr<int32_t>() + r * width + header;
    int64_t rows = 0;
    for (int64_t k = 0; k < buckets; ++k) {
      rows += counts[k * owners + r];
    }
    if (rows > width - header) {
      return;
    }
  }
  const auto write = [&](const auto* keys, const auto* starts) {
    for (int64_t p = 0; p < buckets * owners; ++p) {
      if (p % owners >= ranks) {
        keys += counts[p];
        continue;
      }
      int32_t*& out = target[p % owners];
      for (int64_t i = 0; i < counts[p]; ++i) {
        *out++ = static_cast<int32_t>(*keys++ - starts[p]);
      }
    }
  };
  keys_U.scalar_type() == at::kInt
      ? write(keys_U.const_data_ptr<int32_t>(), part_starts_P1.const_data_ptr<int32_t>())
      : write(keys_U.const_data_ptr<int64_t>(), part_starts_P1.const_data_ptr<int64_t>());
}

// The rows of all messages, one message after another; a message's counts lie from element `first`
// to `end` of its header.
Tensor unpack(const Tensor& messages, int64_t first, int64_t end, int64_t header) {
  TORCH_CHECK(messages.is_contiguous());
  const int64_t ranks = messages.size(0), width = messages.size(1);
  const int32_t* message = messages.const_data_ptr<int32_t>();
  std::vector<int64_t> rows(ranks, 0);
  int64_t total = 0;
  for (int64_t r = 0; r < ranks; ++r) {
    for (int64_t i = first; i < end; ++i) {
      rows[r] += message[r * width + i];
    }
    TORCH_CHECK(rows[r] >= 0 && rows[r] <= width - header, "damaged message of rank ", r);
    total += rows[r];
  }
  Tensor rows_R = at::empty({total}, messages.options());
  int32_t* out = rows_R.mutable_data_ptr<int32_t>();
  for (int64_t r = 0; r < ranks; ++r) {
    std::memcpy(out, message + r * width + header, rows[r] * sizeof(int32_t));
    out += rows[r];
  }
  return rows_R;
}

// ---------------------------------------------------------------- sums

// Rows in a flat buffer: one after another, or anywhere.
struct Rows {
  float* base;
  const int64_t* addresses; // in floats; null if row i is at i * dim
  int64_t dim;

  Rows(const Tensor& flat, const std::optional<Tensor>& addresses, int64_t dim)
      : base(const_cast<float*>(flat.const_data_ptr<float>())),
        addresses(addresses ? addresses->const_data_ptr<int64_t>() : nullptr),
        dim(dim) {}

  INLINED float* operator[](int32_t row) const {
    return base + (addresses ? addresses[row] : row * dim);
  }
};

// Bags in a matrix: `width` of them side by side, from a column on.
struct Bags {
  float* base;
  int64_t count, width, stride, dim;

  Bags(const Tensor& matrix, int64_t column, int64_t width, int64_t dim)
      : base(const_cast<float*>(matrix.const_data_ptr<float>()) + column),
        count(matrix.size(0) * width),
        width(width),
        stride(matrix.stride(0)),
        dim(dim) {}

  // Visits bags in order, without a division for each.
  template <typename Visit>
  INLINED void each(int64_t first, int64_t end, Visit visit) const {
    int64_t slot = first % width;
    float* line = base + first / width * stride;
    for (int64_t b = first; b < end; ++b) {
      visit(b, line + slot * dim);
      if (++slot == width) {
        slot = 0;
        line += stride;
      }
    }
  }
};

// The ids of the bags, what they count for and what a bag's sum is divided by.
struct Ids {
  const int32_t* rows;
  int64_t count;
  const int32_t* offsets; // null if every id is a bag
  const float* weights;
  const float* divisor;

  Ids(const Tensor& rows_N, const std::optional<Tensor>& offsets_B1,
      const std::optional<Tensor>& weights_N, const std::optional<Tensor>& divisor_B)
      : rows(rows_N.const_data_ptr<int32_t>()),
        count(rows_N.numel()),
        offsets(offsets_B1 ? offsets_B1->const_data_ptr<int32_t>() : nullptr),
        weights(weights_N ? weights_N->const_data_ptr<float>() : nullptr),
        divisor(divisor_B ? divisor_B->const_data_ptr<float>() : nullptr) {}

  INLINED int64_t begin(int64_t bag) const { return offsets ? offsets[bag] : bag; }
};

INLINED inline void prefetch(const float* row, int64_t width) {
  for (int64_t d = 0; d < width; d += 16) {
    __builtin_prefetch(row + d);
  }
}

// out = a * weight, or out += a * weight; without a weight there is no rounding of a product.
template <bool kFirst, bool kWeighted>
INLINED inline void accumulate(float* __restrict out, const float* __restrict a, float weight,
                               int64_t n) {
  for (int64_t d = 0; d < n; ++d) {
    const float value = kWeighted ? a[d] * weight : a[d];
    out[d] = kFirst ? value : out[d] + value;
  }
}

template <bool kWeighted>
INLINED inline void accumulate(float* out, const float* a, float weight, int64_t n, bool first) {
  first ? accumulate<true, kWeighted>(out, a, weight, n)
        : accumulate<false, kWeighted>(out, a, weight, n);
}

// Past the cache: an output that does not fit into it would only drive the rows out.
inline void stream(float* out, const float* row, int64_t dim) {
#if defined(__x86_64__)
  for (int64_t d = 0; d < dim; d += 4) {
    _mm_stream_ps(out + d, _mm_loadu_ps(row + d));
  }
#else
  std::memcpy(out, row, dim * sizeof(float));
#endif
}

void stream_bags(const Rows& rows, const Ids& ids, const Bags& bags, int64_t first, int64_t end) {
  bags.each(first, end, [&](int64_t b, float* target) INLINED {
    if (b + kAhead < end) {
      prefetch(rows[ids.rows[b + kAhead]], rows.dim);
    }
    stream(target, rows[ids.rows[b]], rows.dim);
  });
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

FOR_THIS_CPU void sum_bags(Rows rows, Ids ids, Bags bags, int64_t first, int64_t end) {
  const int64_t last = ids.begin(end), dim = rows.dim;
  bags.each(first, end, [&](int64_t b, float* target) INLINED {
    const int64_t from = ids.begin(b), to = ids.begin(b + 1);
    if (from == to) {
      std::memset(target, 0, dim * sizeof(float));
      return;
    }
    for (int64_t i = from; i < to; ++i) {
      if (i + kAhead < last) {
        prefetch(rows[ids.rows[i + kAhead]], dim);
      }
      const float* row = rows[ids.rows[i]];
      ids.weights ? accumulate<true>(target, row, ids.weights[i], dim, i == from)
                  : accumulate<false>(target, row, 1, dim, i == from);
    }
    if (ids.divisor) {
      for (int64_t d = 0; d < dim; ++d) {
        target[d] /= ids.divisor[b];
      }
    }
  });
}

// bag = (sum of weight * row over its ids) / divisor
void bag_sums(const Tensor& flat, const std::optional<Tensor>& addresses, int64_t dim,
              const Tensor& rows_N, const std::optional<Tensor>& offsets_B1,
              const std::optional<Tensor>& weights_N, const std::optional<Tensor>& divisor_B,
              int64_t width, int64_t column, Tensor out) {
  TORCH_CHECK(flat.is_contiguous() && rows_N.is_contiguous() && out.stride(1) == 1);
  const Rows rows(flat, addresses, dim);
  const Ids ids(rows_N, offsets_B1, weights_N, divisor_B);
  const Bags bags(out, column, width, dim);
  const bool aligned = dim % 4 == 0 && bags.stride % 4 == 0 &&
      reinterpret_cast<uintptr_t>(bags.base) % 16 == 0;
  const bool streams = !ids.offsets && !ids.weights && !ids.divisor && aligned &&
      out.nbytes() > kStreamedBytes;
  at::parallel_for(0, bags.count, 1024, [&](int64_t begin, int64_t end) {
    streams ? stream_bags(rows, ids, bags, begin, end) : sum_bags(rows, ids, bags, begin, end);
  });
}

// By value: writing to `seen`, which are chars, could otherwise change them for all C++ knows.
FOR_THIS_CPU void sum_rows(Bags bags, Ids ids, Rows rows, int64_t num_rows, int64_t first_column,
                           int64_t width, float scale) {
  std::vector<char> seen(num_rows, 0);
  bags.each(0, bags.count, [&](int64_t b, const float* bag) INLINED {
    bag += first_column;
    for (int64_t i = ids.begin(b); i < ids.begin(b + 1); ++i) {
      if (i + kAhead < ids.count) {
        prefetch(rows[ids.rows[i + kAhead]] + first_column, width);
      }
      const int32_t row = ids.rows[i];
      float* target = rows[row] + first_column;
      if (ids.divisor) { // a loop of its own: the quotient is rounded before the weight counts
        const float divisor = ids.divisor[b];
        const float weight = ids.weights ? ids.weights[i] * scale : scale;
        for (int64_t d = 0; d < width; ++d) {
          const float value = bag[d] / divisor * weight;
          target[d] = seen[row] ? target[d] + value : value;
        }
      } else if (ids.weights) {
        accumulate<true>(target, bag, ids.weights[i] * scale, width, !seen[row]);
      } else {
        accumulate<true>(target, bag, scale, width, !seen[row]);
      }
      seen[row] = 1;
    }
  });
  for (int64_t row = 0; row < num_rows; ++row) {
    if (!seen[row]) {
      std::memset(rows[row] + first_column, 0, width * sizeof(float));
    }
  }
}

// row = scale * sum of weight * bag / divisor over its ids, in the order of the ids; the scale is a
// power of two, so it does not matter where it comes in.  Threads share the columns, so that the
// order of the sums does not depend on their number.
void row_sums(const Tensor& gradient, int64_t width, int64_t column, const Tensor& rows_N,
              const std::optional<Tensor>& offsets_B1, const std::optional<Tensor>& weights_N,
              const std::optional<Tensor>& divisor_B, const std::optional<Tensor>& addresses,
              int64_t num_rows, int64_t dim, double scale, Tensor out) {
  TORCH_CHECK(gradient.stride(1) == 1 && rows_N.is_contiguous() && out.is_contiguous());
  const Bags bags(gradient, column, width, dim);
  const Ids ids(rows_N, offsets_B1, weights_N, divisor_B);
  const Rows rows(out, addresses, dim);
  const int64_t line = 16; // floats of a cache line
  at::parallel_for(0, (dim + line - 1) / line, 1, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * line;
    const int64_t columns = std::min(end * line, dim) - first;
    sum_rows(bags, ids, rows, num_rows, first, columns, static_cast<float>(scale));
  });
}

// ---------------------------------------------------------------- largest entries

// Positions of the numbers whose magnitude is at least `least`, in the room of their rank each, and
// how many are in each row.  NaN counts as large.  False if some rank has not enough room.
std::tuple<Tensor, Tensor, bool> largest(const Tensor& numbers, const Tensor& least,
                                         at::IntArrayRef counts, at::IntArrayRef rooms) {
  const Tensor dense = numbers.contiguous();
  const int64_t rows = dense.size(0), dim = dense.size(1);
  const int64_t total = std::accumulate(rooms.begin(), rooms.end(), int64_t{0});
  Tensor at = at::full({total}, rows * dim, dense.options().dtype(at::kLong));
  Tensor in_row = at::empty({rows}, dense.options().dtype(at::kLong));
  const float* value = dense.const_data_ptr<float>();
  const float limit = *least.const_data_ptr<float>();
  int64_t* place = at.mutable_data_ptr<int64_t>();
  int64_t* found = in_row.mutable_data_ptr<int64_t>();
  int64_t row = 0;
  for (size_t rank = 0; rank < counts.size(); ++rank) {
    int64_t used = 0;
    for (const int64_t end = row + counts[rank]; row < end; ++row) {
      const int64_t before = used;
      for (int64_t i = row * dim; i < (row + 1) * dim; ++i) {
        if (!(std::fabs(value[i]) < limit)) {
          if (used == rooms[rank]) {
            return {at, in_row, false};
          }
          place[used++] = i;
        }
      }
      found[row] = used - before;
    }
    place += rooms[rank];
  }
  return {at, in_row, true};
}

// A bit for each number of the rows, whole bytes for each row; positions behind the last number
// are of unused room.
Tensor to_bits(const Tensor& at, int64_t rows, int64_t dim) {
  const int64_t width = (dim + 7) / 8;
  Tensor bits = at::zeros({rows * width}, at.options().dtype(at::kByte));
  uint8_t* byte = bits.mutable_data_ptr<uint8_t>();
  const int64_t* place = at.const_data_ptr<int64_t>();
  int64_t row = 0, begin = 0; // positions ascend, but for unused room
  for (int64_t i = 0; i < at.numel(); ++i) {
    if (place[i] >= rows * dim) {
      continue;
    }
    while (place[i] >= begin + dim) {
      ++row;
      begin += dim;
    }
    const int64_t column = place[i] - begin;
    byte[row * width + column / 8] |= static_cast<uint8_t>(1 << (column % 8));
  }
  return bits;
}

// The inverse: positions in the room of their rank each.
Tensor from_bits(const Tensor& bits, int64_t dim, at::IntArrayRef counts, at::IntArrayRef rooms) {
  const int64_t width = (dim + 7) / 8;
  const int64_t rows = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  const int64_t total = std::accumulate(rooms.begin(), rooms.end(), int64_t{0});
  Tensor at = at::full({total}, rows * dim, bits.options().dtype(at::kLong));
  int64_t* place = at.mutable_data_ptr<int64_t>();
  const uint8_t* byte = bits.const_data_ptr<uint8_t>();
  int64_t row = 0;
  for (size_t rank = 0; rank < counts.size(); ++rank) {
    int64_t used = 0;
    for (const int64_t end = row + counts[rank]; row < end; ++row) {
      for (int64_t k = 0; k < width; ++k) {
        for (unsigned left = byte[row * width + k]; left != 0; left &= left - 1) {
          TORCH_CHECK(used < rooms[rank], "more entries than there is room for");
          place[used++] = row * dim + 8 * k + std::countr_zero(left);
        }
      }
    }
    place += rooms[rank];
  }
  return at;
}

} // namespace

TORCH_LIBRARY_FRAGMENT(fusedrec, m) {
  m.def("to_bits(Tensor at, int rows, int dim) -> Tensor");
  m.def("from_bits(Tensor bits, int dim, int[] counts, int[] rooms) -> Tensor");
  m.def("largest(Tensor numbers, Tensor least, int[] counts, int[] rooms) "
        "-> (Tensor, Tensor, bool)");
  m.def("keys(Tensor ids, Tensor counts, Tensor rows, Tensor starts, Tensor shifts, "
        "ScalarType key_type) -> (Tensor, Tensor)");
  m.def("hot_table(Tensor keys, Tensor replicas) -> Tensor");
  m.def("dedup(Tensor keys, Tensor part_starts, Tensor? hot_table=None) "
        "-> (Tensor, Tensor, Tensor)");
  m.def("pack(Tensor keys, Tensor counts, Tensor part_starts, int header, "
        "Tensor(a!) messages) -> ()");
  m.def("unpack(Tensor messages, int first, int end, int header) -> Tensor");
  m.def("bag_sums(Tensor flat, Tensor? addresses, int dim, Tensor rows, Tensor? offsets, "
        "Tensor? weights, Tensor? divisor, int width, int column, Tensor(a!) out) -> ()");
  m.def("row_sums(Tensor gradient, int width, int column, Tensor rows, Tensor? offsets, "
        "Tensor? weights, Tensor? divisor, Tensor? addresses, int num_rows, int dim, "
        "float scale, Tensor(a!) out) -> ()");
}

TORCH_LIBRARY_IMPL(fusedrec, CPU, m) {
  m.impl("to_bits", to_bits);
  m.impl("from_bits", from_bits);
  m.impl("largest", largest);
  m.impl("keys", keys);
  m.impl("hot_table", hot_table);
  m.impl("dedup", dedup);
  m.impl("pack", pack);
  m.impl("unpack", unpack);
  m.impl("bag_sums", bag_sums);
  m.impl("row_sums", row_sums);
}
