// Checks of what an operator is given; an error names the operator, the argument and the value.
//
// They keep every read and write inside of its tensor, whatever the caller passes.  They are cheap
// beside the work: indices are passed over once, by vector instructions, and rows of floats never.
#pragma once

#include "common.h"

#include <algorithm>
#include <initializer_list>

namespace {

// The largest of the numbers, with negative ones counted as very large.
FOR_THIS_CPU uint32_t largest_unsigned(const int32_t* values, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, static_cast<uint32_t>(values[i]));
  }
  return largest;
}

FOR_THIS_CPU uint64_t largest_unsigned(const int64_t* values, int64_t count) {
  uint64_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, static_cast<uint64_t>(values[i]));
  }
  return largest;
}

FOR_THIS_CPU bool never_descends(const int32_t* values, int64_t count) {
  int32_t descents = 0;
  for (int64_t i = 1; i < count; ++i) {
    descents |= values[i - 1] > values[i];
  }
  return descents == 0;
}

class Checks {
 public:
  explicit Checks(const char* op) : op_(op) {}

  template <typename... Parts>
  void that(bool holds, const Parts&... parts) const {
    TORCH_CHECK(holds, "fusedrec::", op_, ": ", parts...);
  }

  // The tensor is in the memory of the host and has one of the types.
  void typed(const char* name, const Tensor& tensor,
             std::initializer_list<at::ScalarType> types) const {
    that(tensor.device().is_cpu() && tensor.layout() == at::kStrided, name,
         " must be a strided tensor on the CPU");
    that(std::find(types.begin(), types.end(), tensor.scalar_type()) != types.end(), name,
         " must be ", *types.begin(), types.size() > 1 ? " or " : "",
         types.size() > 1 ? c10::toString(*(types.end() - 1)) : "", ", not ", tensor.scalar_type());
  }

  // The same, and its elements lie one after another.
  void dense(const char* name, const Tensor& tensor,
             std::initializer_list<at::ScalarType> types) const {
    typed(name, tensor, types);
    that(tensor.is_contiguous(), name, " must be contiguous");
  }

  void is_matrix(const char* name, const Tensor& tensor) const {
    that(tensor.dim() == 2, name, " must have 2 dimensions, not ", tensor.dim());
  }

  void length(const char* name, int64_t found, int64_t expected) const {
    that(found == expected, name, " must have ", expected, " elements, not ", found);
  }

  void at_least(const char* name, int64_t value, int64_t least) const {
    that(value >= least, name, " must be at least ", least, ", not ", value);
  }

  // All values are in [0, end).
  template <typename Value>
  void below(const char* name, const Value* values, int64_t count, int64_t end) const {
    const uint64_t limit = std::max<int64_t>(end, 0);
    if (count == 0 || largest_unsigned(values, count) < limit) {
      return;
    }
    const Value* bad = std::find_if(values, values + count,
                                    [&](Value value) { return value < 0 || value >= end; });
    that(false, name, " must be in [0, ", end, "), but element ", bad - values, " is ", *bad);
  }

  // Begins with 0, never descends and ends with the number of ids.
  void offsets(const char* name, const Tensor& tensor, int64_t bags, int64_t ids) const {
    length(name, tensor.numel(), bags + 1);
    const int32_t* values = tensor.const_data_ptr<int32_t>();
    that(values[0] == 0 && values[bags] == ids, name, " must run from 0 to ", ids,
         ", not from ", values[0], " to ", values[bags]);
    that(never_descends(values, bags + 1), name, " must not descend");
  }

  // The sum of numbers none of which is negative.
  int64_t sum(const char* name, at::IntArrayRef values) const {
    int64_t total = 0;
    for (const int64_t value : values) {
      at_least(name, value, 0);
      that(!__builtin_add_overflow(total, value, &total), "the sum of ", name, " is too large");
    }
    return total;
  }

  int64_t product(const char* name, int64_t a, int64_t b) const {
    int64_t result = 0;
    that(!__builtin_mul_overflow(a, b, &result), name, " are too many: ", a, " times ", b);
    return result;
  }

 private:
  const char* op_;
};

at::IntArrayRef as_array(const Tensor& tensor) {
  return {tensor.const_data_ptr<int64_t>(), static_cast<size_t>(tensor.numel())};
}

} // namespace
