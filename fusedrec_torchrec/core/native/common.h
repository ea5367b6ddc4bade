// What all operators share.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>

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

} // namespace
