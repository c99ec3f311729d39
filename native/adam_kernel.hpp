// The AdamW arithmetic on one block, for every dtype and instruction set. Plain twin: runtime/adam_reference.py.
#pragma once

#include <cstdint>

#include "dtype.hpp"
#include "instruction_set.hpp"

namespace spipe {

// Work is split, non-finite gradients are bypassed and norms are summed in blocks of this many elements, counted from
// the start of each parameter.
constexpr int64_t block_elements = 4096;

// Scalars of one step of one group of parameters: computed in double, rounded once to fp32.
struct AdamScalars {
    float gradient_scale;
    float beta1;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float step_size;  // learning_rate * sqrt(1 - beta2^t) / (1 - beta1^t)
    float epsilon;    // epsilon * sqrt(1 - beta2^t)
    float decay;      // 1 - learning_rate * weight_decay
    float l2_decay;
    // Only for the undo log, which corrects whatever they miss: inverses, less about 100 units in the last place, so
    // that corrections are positive.
    float inverse_beta1;
    float inverse_beta2;
    float inverse_decay;
};

// Where a block lies: addresses of its first elements; gradient2 may be null.
struct BlockPointers {
    const void* gradient;
    const void* gradient2;
    float* master;
    float* first_moment;
    float* second_moment;
    void* weight;
    int64_t count;
};

struct StepMode {
    // Elements by which reading runs ahead, into `next` at the end of the block; 0: not at all.
    int64_t prefetch_elements;
    BlockPointers next;
    // Stores that bypass the caches; only where the addresses are multiples of a vector's size.
    bool stream_weight;
    bool stream_state;
    // Round the weight up with the probability of the fraction that is cut off, with noise that is a function of the
    // key and the element's place in the block.
    bool stochastic;
    uint64_t random_key;
    // Where master and moments are kept as they were, at multiples of 64 and with room for whole cache lines; null:
    // not.
    BlockPointers snapshot;
    bool stream_snapshot;
};

// An element whose old value is too many units in the last place from what the arithmetic inverse gives.
struct Escape {
    static constexpr int index_bits = 12;
    uint32_t
        where;  // block in its chunk, state (0 master, 1 first, 2 second moment), index in the block: 18, 2, 12 bits
    uint32_t bits;  // the old fp32 value
};
static_assert(block_elements == 1 << Escape::index_bits);

// Elements of a block, rounded up to whole cache lines of bytes.
constexpr int64_t padded(int64_t count) {
    return (count + 63) / 64 * 64;
}

// Undo data of one block: 3 * padded(count) bytes of corrections, and escapes. The three bytes of an element are for
// master, first and second moment: old value minus biased arithmetic inverse, as integers.
struct UndoLog {
    uint8_t* corrections;  // at a multiple of 64
    bool streaming;        // write them past the caches
    Escape* escapes;       // room for 3 * block_elements
    int64_t num_escapes;
    uint32_t block_in_chunk;
};

struct Inspection {
    bool nonfinite;         // some scaled gradient is NaN or infinite
    uint32_t checksum;      // of the bits of the scaled gradients, for an undo log; 0 unless asked for
    double sum_of_squares;  // of the gradients before scaling; 0 unless asked for
};

struct AdamKernels {
    // The gradient of a block: gradient [+ gradient2], summed in fp32 and scaled. Reads nothing else of the block.
    Inspection (*inspect[num_dtypes])(const BlockPointers& block, float gradient_scale, bool with_sum,
                                      bool with_checksum);
    // One step in place; weight[i] = round(master[i]). Indices: dtype of gradient and weight.
    void (*step[num_dtypes][num_dtypes])(const AdamScalars&, const BlockPointers&, const StepMode&);
    // The same, and writes what `undo` needs.
    void (*logged_step[num_dtypes][num_dtypes])(const AdamScalars&, const BlockPointers&, const StepMode&, UndoLog&);
    // Restores master and moments to the bit; the gradient must be the one of the step.
    void (*undo[num_dtypes])(const AdamScalars&, const BlockPointers&, const UndoLog&);
    // weight[i] = round(master[i]), to nearest even.
    void (*round_weight[num_dtypes])(const float* master, void* weight, int64_t count);
    // Copies, [1] past the caches; the destination is a multiple of 64.
    void (*copy[2])(void* destination, const void* source, int64_t num_bytes);
    // Makes what was written past the caches visible to other threads before anything written later.
    void (*fence)();
};

const AdamKernels& adam_kernels(InstructionSet set);

namespace baseline {
extern const AdamKernels adam_kernels;
}
namespace avx2 {
extern const AdamKernels adam_kernels;
}
namespace avx512 {
extern const AdamKernels adam_kernels;
}

}  // namespace spipe
