// What the optimizer needs to know of one parameter, and the checks that come before any memory is touched.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "dtype.hpp"

namespace spipe {

struct Parameter {
    uintptr_t gradient = 0;
    uintptr_t gradient2 = 0;  // added to the first gradient in fp32 (tied weights); 0 if there is none
    Dtype gradient_dtype = Dtype::fp32;
    uintptr_t master = 0;         // fp32
    uintptr_t first_moment = 0;   // fp32
    uintptr_t second_moment = 0;  // fp32
    uintptr_t weight = 0;
    Dtype weight_dtype = Dtype::fp32;
    int64_t count = 0;                            // elements in each of the buffers
    double weight_decay = 0;                      // decoupled, of AdamW
    double l2_decay = 0;                          // added to the gradient times the master
    double learning_rate_factor = 1;              // on the learning rate of the step
    std::optional<double> beta1, beta2, epsilon;  // instead of the optimizer's
    uint64_t random_stream = 0;                   // for stochastic rounding: distinguishes parameters
};

Dtype dtype_of_name(const std::string& argument, const std::string& name);
const char* name_of_dtype(Dtype dtype);

// Throws std::invalid_argument, naming the argument and its value, unless the condition holds.
void require(bool condition, const std::string& argument, double value, const char* allowed);
void check_betas_and_epsilon(const std::string& prefix, double beta1, double beta2, double epsilon);

// Throws std::invalid_argument, naming the argument and its value, unless the pointer is non-null and aligned.
void check_pointer(const std::string& argument, uintptr_t pointer, Dtype dtype);
void check_count(const std::string& argument, int64_t count);

// Checks each parameter, and that no two buffers of the bucket overlap.
void check_bucket(const std::vector<Parameter>& parameters);

}  // namespace spipe
