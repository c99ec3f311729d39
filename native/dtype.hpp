// Element types of the buffers. Their conversions to and from fp32 are in vector_dtype.hpp.
#pragma once

#include <cstdint>

#define SPIPE_INLINE static inline __attribute__((always_inline))

namespace spipe {

enum class Dtype { fp32 = 0, bf16 = 1, fp16 = 2 };
constexpr int num_dtypes = 3;

constexpr int64_t bytes_per_element(Dtype dtype) {
    return dtype == Dtype::fp32 ? 4 : 2;
}

}  // namespace spipe
