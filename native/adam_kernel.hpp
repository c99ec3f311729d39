// The AdamW arithmetic on one block, for every dtype and instruction set. Plain twin: runtime/adam_reference.py.
#pragma once

#include <cstdint>

#include "dtype.hpp"
#include "instruction_set.hpp"

namespace spipe {

// Work is split, non-finite gradients are bypassed and norms are summed in blocks of this many elements, counted from
// the start of each parameter.
constexpr int64_t block_elements = 4096;

// Scalars of one step: computed in double, rounded once to fp32.
struct AdamScalars {
    float gradient_scale;
    float beta1;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float step_size;              // learning_rate / (1 - beta1^t)
    float sqrt_bias_correction2;  // sqrt(1 - beta2^t)
    float epsilon;
};

AdamScalars adam_scalars(double beta1, double beta2, double epsilon, int64_t step, double learning_rate,
                         double gradient_scale);

// Factor by which weight decay shrinks the master weight: fp32(1 - learning_rate * weight_decay).
float decay_factor(double learning_rate, double weight_decay);

struct AdamKernels {
    // scaled[i] = (float(gradient[i]) [+ float(gradient2[i])]) * scale; true if any result is NaN or infinite.
    bool (*scale_gradient[3])(const void* gradient, const void* gradient2, float scale, float* scaled, int64_t count);
    // One AdamW step in place from scaled gradients; weight[i] = round(master[i]).
    void (*step[3])(const AdamScalars& scalars, float decay, const float* scaled, float* master, float* first_moment,
                    float* second_moment, void* weight, int64_t count);
    // weight[i] = round(master[i]).
    void (*round_weight[3])(const float* master, void* weight, int64_t count);
};

// The three-element arrays are indexed by Dtype: of the gradient for the first, of the weight for the others.
const AdamKernels& adam_kernels(InstructionSet set);

}  // namespace spipe
