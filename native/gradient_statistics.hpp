// Non-finite flag and squared norm of a gradient, the same bits for any number of threads.
#pragma once

#include <cstdint>
#include <memory>

#include "dtype.hpp"
#include "worker_pool.hpp"

namespace spipe {

struct GradientStatistics {
    bool nonfinite;
    double sum_of_squares;  // NaN or infinity if nonfinite
};

// Each block of `block_elements` is summed in fp64 in a fixed order (see vector_inspect.hpp), then the block sums are
// added in order. With a second
// gradient the statistics are those of the fp32 sum of both. `pool` may be null: the calling thread does the work.
// Throws std::invalid_argument for a null or misaligned pointer or a count below 1.
GradientStatistics gradient_statistics(WorkerPool* pool, uintptr_t gradient, uintptr_t gradient2, Dtype dtype,
                                       int64_t count);

}  // namespace spipe
