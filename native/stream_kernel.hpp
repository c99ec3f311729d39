// Reference loops for benchmarks: what memory can do with the optimizer's streams.
#pragma once

#include <cstdint>
#include <string>

#include "dtype.hpp"
#include "instruction_set.hpp"
#include "worker_pool.hpp"

namespace spipe {

struct StreamArguments {
    const uint16_t* gradient;
    float* master;
    float* first_moment;
    float* second_moment;
    uint16_t* weight;
    float* destination;
    int64_t count;
    uint32_t zero;
    float factor;
};

using StreamKernel = void (*)(const StreamArguments&);

struct StreamKernels {
    StreamKernel same_streams[3];  // plain stores; weight past the caches; everything past the caches
    StreamKernel triad[2];         // plain stores; past the caches
};

const StreamKernels& stream_kernels(InstructionSet set);

namespace baseline {
extern const StreamKernels stream_kernels;
}
namespace avx2 {
extern const StreamKernels stream_kernels;
}
namespace avx512 {
extern const StreamKernels stream_kernels;
}

// Runs "streams", "streams_weight_nt", "streams_nt", "triad" or "triad_nt" on all workers; returns the seconds from the
// first worker's start to the last one's end. Throws std::invalid_argument for another name, an address that is not a
// multiple of 64, or a count that is not a positive multiple of 64.
double run_streams(WorkerPool& pool, const std::string& name, const StreamArguments& arguments);

}  // namespace spipe
