// Rows to sums of bags, and gradients of bags to sums of rows; see exchange/pooling.py.
#pragma once

#include "checks.h"

#include <ATen/Parallel.h>

#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace {

// Larger outputs bypass the cache.  Measured with two ranks on a cache of 32 MB, writing and then
// reading an output of 14 MB: 1.62 ms past the cache, 1.68 ms through it; the larger, the clearer.
constexpr size_t kStreamedBytes = 8 << 20;

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
      : base(const_cast<float*>(matrix.const_data_ptr<float>()) + (matrix.numel() ? column : 0)),
        count(matrix.size(0) * width),
        width(width),
        stride(matrix.stride(0)),
        dim(dim) {}

  // Goes from bag to bag, without a division for each.
  struct Cursor {
    const Bags& bags;
    int64_t slot;
    float* line;

    INLINED Cursor(const Bags& bags, int64_t bag)
        : bags(bags), slot(bag % bags.width), line(bags.base + bag / bags.width * bags.stride) {}

    INLINED float* operator*() const { return line + slot * bags.dim; }

    INLINED void next() {
      if (++slot == bags.width) {
        slot = 0;
        line += bags.stride;
      }
    }
  };

  template <typename Visit>
  INLINED void each(int64_t first, int64_t end, Visit visit) const {
    Cursor cursor(*this, first);
    for (int64_t b = first; b < end; ++b, cursor.next()) {
      visit(b, *cursor);
    }
  }
};

// The ids of the bags, what they count for and what a bag's sum is divided by.  If every id is a bag,
// a row number that is the number of rows stands for no row at all.
struct Ids {
  const int32_t* rows;
  int64_t count;
  int32_t none;
  const int32_t* offsets; // null if every id is a bag
  const float* weights;
  const float* divisor;

  Ids(const Tensor& rows_N, const std::optional<Tensor>& offsets_B1,
      const std::optional<Tensor>& weights_N, const std::optional<Tensor>& divisor_B,
      int64_t num_rows)
      : rows(rows_N.const_data_ptr<int32_t>()),
        count(rows_N.numel()),
        none(static_cast<int32_t>(num_rows)),
        offsets(offsets_B1 ? offsets_B1->const_data_ptr<int32_t>() : nullptr),
        weights(weights_N ? weights_N->const_data_ptr<float>() : nullptr),
        divisor(divisor_B ? divisor_B->const_data_ptr<float>() : nullptr) {}

  INLINED int64_t begin(int64_t bag) const { return offsets ? offsets[bag] : bag; }
};

// Each line of the matrix has room for `width` bags from the column on.
void check_bags(const Checks& check, const char* name, const Tensor& matrix, int64_t width,
                int64_t column, int64_t dim) {
  check.typed(name, matrix, {at::kFloat});
  check.is_matrix(name, matrix);
  const int64_t columns = matrix.size(1);
  check.that(columns <= 1 || matrix.stride(1) == 1, "the columns of ", name,
             " must lie one after another");
  check.at_least("width", width, 1);
  check.at_least("dim", dim, 1);
  check.that(column >= 0 && column <= columns && width <= (columns - column) / dim, name, " has ",
             columns, " columns, which ", width, " bags of ", dim, " from column ", column,
             " on do not fit into");
}

// Returns how many rows there are in the flat buffer; all of them are within it.
int64_t check_rows(const Checks& check, const char* name, const Tensor& flat,
                   const std::optional<Tensor>& addresses, int64_t dim) {
  check.dense(name, flat, {at::kFloat});
  if (!addresses) {
    return flat.numel() / dim;
  }
  check.dense("addresses", *addresses, {at::kLong});
  check.below("addresses", addresses->const_data_ptr<int64_t>(), addresses->numel(),
              flat.numel() - dim + 1);
  return addresses->numel();
}

void check_ids(const Checks& check, const Tensor& rows_N, const std::optional<Tensor>& offsets_B1,
               const std::optional<Tensor>& weights_N, const std::optional<Tensor>& divisor_B,
               int64_t bags, int64_t num_rows) {
  check.dense("rows", rows_N, {at::kInt});
  check.that(num_rows <= std::numeric_limits<int32_t>::max(), "rows must be fewer than 2^31");
  check.below("rows", rows_N.const_data_ptr<int32_t>(), rows_N.numel(),
              offsets_B1 ? num_rows : num_rows + 1);
  if (offsets_B1) {
    check.dense("offsets", *offsets_B1, {at::kInt});
    check.offsets("offsets", *offsets_B1, bags, rows_N.numel());
  } else {
    check.length("rows", rows_N.numel(), bags);
  }
  if (weights_N) {
    check.dense("weights", *weights_N, {at::kFloat});
    check.length("weights", weights_N->numel(), rows_N.numel());
  }
  if (divisor_B) {
    check.dense("divisor", *divisor_B, {at::kFloat});
    check.length("divisor", divisor_B->numel(), bags);
  }
}

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
    if (b + kAhead < end && ids.rows[b + kAhead] != ids.none) {
      prefetch(rows[ids.rows[b + kAhead]], rows.dim);
    }
    if (ids.rows[b] == ids.none) {
      std::memset(target, 0, rows.dim * sizeof(float));
    } else {
      stream(target, rows[ids.rows[b]], rows.dim);
    }
  });
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

FOR_THIS_CPU void sum_bags(Rows rows, Ids ids, Bags bags, int64_t first, int64_t end) {
  const int64_t last = ids.begin(end), dim = rows.dim;
  bags.each(first, end, [&](int64_t b, float* target) INLINED {
    const int64_t from = ids.begin(b), to = ids.begin(b + 1);
    if (from == to || ids.rows[from] == ids.none) {
      std::memset(target, 0, dim * sizeof(float));
      return;
    }
    for (int64_t i = from; i < to; ++i) {
      if (i + kAhead < last && ids.rows[i + kAhead] != ids.none) {
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
  const Checks check("bag_sums");
  check_bags(check, "out", out, width, column, dim);
  const int64_t num_rows = check_rows(check, "flat", flat, addresses, dim);
  check_ids(check, rows_N, offsets_B1, weights_N, divisor_B, out.size(0) * width, num_rows);
  const Rows rows(flat, addresses, dim);
  const Ids ids(rows_N, offsets_B1, weights_N, divisor_B, num_rows);
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
  // Bags that do not fill a line are not asked for ahead by the hardware.
  Bags::Cursor ahead(bags, std::min(kAhead, bags.count));
  bags.each(0, bags.count, [&](int64_t b, const float* bag) INLINED {
    bag += first_column;
    if (b + kAhead < bags.count) {
      prefetch(*ahead + first_column, width);
      ahead.next();
    }
    for (int64_t i = ids.begin(b); i < ids.begin(b + 1); ++i) {
      if (i + kAhead < ids.count && ids.rows[i + kAhead] != ids.none) {
        prefetch(rows[ids.rows[i + kAhead]] + first_column, width);
      }
      const int32_t row = ids.rows[i];
      if (row == ids.none) {
        continue;
      }
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
  const Checks check("row_sums");
  check_bags(check, "gradient", gradient, width, column, dim);
  const int64_t room = check_rows(check, "out", out, addresses, dim);
  check.that(num_rows >= 0 && num_rows <= room, "num_rows must be in [0, ", room, "], not ",
             num_rows);
  check_ids(check, rows_N, offsets_B1, weights_N, divisor_B, gradient.size(0) * width, num_rows);
  const Bags bags(gradient, column, width, dim);
  const Ids ids(rows_N, offsets_B1, weights_N, divisor_B, num_rows);
  const Rows rows(out, addresses, dim);
  const int64_t line = 16; // floats of a cache line
  at::parallel_for(0, (dim + line - 1) / line, 1, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * line;
    const int64_t columns = std::min(end * line, dim) - first;
    sum_rows(bags, ids, rows, num_rows, first, columns, static_cast<float>(scale));
  });
}

} // namespace
