// The entries of rows that reach a threshold, and their positions as bits; see codecs/dct.py.
#pragma once

#include "checks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <bit>
#include <cmath>
#include <tuple>

namespace {

// Positions of the numbers whose magnitude is at least `threshold`, each in the room of its rank, and
// how many are in each row.  NaN counts as large.  False if some rank has not enough room.
std::tuple<Tensor, Tensor, bool> select_entries(const Tensor& numbers, const Tensor& threshold,
                                                at::IntArrayRef counts, at::IntArrayRef rooms) {
  const Checks check("select_entries");
  check.typed("numbers", numbers, {at::kFloat});
  check.is_matrix("numbers", numbers);
  check.dense("threshold", threshold, {at::kFloat});
  check.length("threshold", threshold.numel(), 1);
  check.length("rooms", rooms.size(), counts.size());
  const Tensor dense = numbers.contiguous();
  const int64_t rows = dense.size(0), dim = dense.size(1);
  check.that(check.sum("counts", counts) == rows, "counts must sum to ", rows, ", not be ", counts);
  const int64_t total = check.sum("rooms", rooms);
  Tensor at = at::full({total}, rows * dim, dense.options().dtype(at::kLong));
  Tensor in_row = at::empty({rows}, dense.options().dtype(at::kLong));
  const float* value = dense.const_data_ptr<float>();
  const float limit = *threshold.const_data_ptr<float>();
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

int64_t bytes_of(int64_t dim) {
  return dim / 8 + (dim % 8 != 0);
}

// A bit for each number of the rows, whole bytes for each row; positions behind the last number
// are of unused room.
Tensor to_bits(const Tensor& at, int64_t rows, int64_t dim) {
  const Checks check("to_bits");
  check.dense("at", at, {at::kLong});
  check.at_least("rows", rows, 0);
  check.at_least("dim", dim, 1);
  const int64_t width = bytes_of(dim), size = check.product("numbers", rows, dim);
  Tensor bits = at::zeros({rows * width}, at.options().dtype(at::kByte));
  uint8_t* byte = bits.mutable_data_ptr<uint8_t>();
  const int64_t* place = at.const_data_ptr<int64_t>();
  int64_t row = 0, begin = 0; // positions ascend, but for unused room
  for (int64_t i = 0; i < at.numel(); ++i) {
    if (place[i] >= size) {
      continue;
    }
    check.that(place[i] >= begin, "positions must not descend, nor be negative, but number ", i,
               " is ", place[i]);
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
  const Checks check("from_bits");
  check.dense("bits", bits, {at::kByte});
  check.at_least("dim", dim, 1);
  check.length("rooms", rooms.size(), counts.size());
  const int64_t width = bytes_of(dim), rows = check.sum("counts", counts);
  check.length("bits", bits.numel(), check.product("bytes", rows, width));
  const int64_t total = check.sum("rooms", rooms);
  Tensor at = at::full({total}, rows * dim, bits.options().dtype(at::kLong));
  int64_t* place = at.mutable_data_ptr<int64_t>();
  const uint8_t* byte = bits.const_data_ptr<uint8_t>();
  int64_t row = 0;
  for (size_t rank = 0; rank < counts.size(); ++rank) {
    int64_t used = 0;
    for (const int64_t end = row + counts[rank]; row < end; ++row) {
      check.that(((byte[row * width + width - 1] << (8 * width - dim)) & ~0xff) == 0, "row ", row,
                 " has bits behind its ", dim, " columns");
      for (int64_t k = 0; k < width; ++k) {
        for (unsigned left = byte[row * width + k]; left != 0; left &= left - 1) {
          check.that(used < rooms[rank], "more entries than there is room for");
          place[used++] = row * dim + 8 * k + std::countr_zero(left);
        }
      }
    }
    place += rooms[rank];
  }
  return at;
}

} // namespace
