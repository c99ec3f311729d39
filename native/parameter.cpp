#include "parameter.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "text.hpp"

namespace spipe {
namespace {

struct Range {
    uintptr_t begin;
    uintptr_t end;
    size_t parameter;
    const char* name;
};

std::string label(size_t parameter, const char* name) {
    return "parameter " + std::to_string(parameter) + ": " + name;
}

void check_overlap(std::vector<Range>& ranges) {
    std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
    for (size_t i = 1; i < ranges.size(); ++i) {
        const Range& a = ranges[i - 1];
        const Range& b = ranges[i];
        if (b.begin < a.end) {
            throw std::invalid_argument(label(b.parameter, b.name) + " at " + hexadecimal(b.begin) + " overlaps " +
                                        a.name + " of parameter " + std::to_string(a.parameter) + ", which is " +
                                        hexadecimal(a.begin) + ".." + hexadecimal(a.end) +
                                        "; the buffers of a bucket must be disjoint");
        }
    }
}

}  // namespace

void require(bool condition, const std::string& argument, double value, const char* allowed) {
    if (condition) return;
    throw std::invalid_argument(argument + " is " + text_of(value) + "; it must be " + allowed);
}

void check_betas_and_epsilon(const std::string& prefix, double beta1, double beta2, double epsilon) {
    require(beta1 >= 0 && beta1 < 1, prefix + "beta1", beta1, "in [0, 1)");
    require(beta2 >= 0 && beta2 < 1, prefix + "beta2", beta2, "in [0, 1)");
    require(epsilon > 0 && !std::isinf(epsilon), prefix + "epsilon", epsilon, "positive and finite");
}

Dtype dtype_of_name(const std::string& argument, const std::string& name) {
    for (Dtype dtype : {Dtype::fp32, Dtype::bf16, Dtype::fp16}) {
        if (name == name_of_dtype(dtype)) return dtype;
    }
    throw std::invalid_argument(argument + " is '" + name + "'; it must be 'fp32', 'bf16' or 'fp16'");
}

const char* name_of_dtype(Dtype dtype) {
    return dtype == Dtype::fp32 ? "fp32" : dtype == Dtype::bf16 ? "bf16" : "fp16";
}

void check_pointer(const std::string& argument, uintptr_t pointer, Dtype dtype) {
    const auto alignment = static_cast<uintptr_t>(bytes_per_element(dtype));
    if (pointer == 0) throw std::invalid_argument(argument + " is 0 (null); it must be the address of a CPU buffer");
    if (pointer % alignment != 0) {
        throw std::invalid_argument(argument + " is " + hexadecimal(pointer) + "; it must be a multiple of " +
                                    std::to_string(alignment) + " for " + name_of_dtype(dtype));
    }
}

void check_count(const std::string& argument, int64_t count) {
    // The largest object that an address space of 47 bits can hold; beyond it, sizes in bytes could overflow.
    const int64_t maximum = int64_t{1} << 45;
    if (count <= 0 || count > maximum) {
        throw std::invalid_argument(argument + " is " + std::to_string(count) +
                                    "; it must be a number of elements between 1 and 2^45");
    }
}

void check_bucket(const std::vector<Parameter>& parameters) {
    if (parameters.empty()) throw std::invalid_argument("parameters is empty; a bucket needs at least one parameter");
    std::vector<Range> ranges;
    ranges.reserve(6 * parameters.size());
    for (size_t i = 0; i < parameters.size(); ++i) {
        const Parameter& p = parameters[i];
        check_count(label(i, "count"), p.count);
        const auto not_negative = [&](const char* name, double value) {
            require(value >= 0 && !std::isinf(value), label(i, name), value, "finite and not negative");
        };
        not_negative("weight_decay", p.weight_decay);
        not_negative("l2_decay", p.l2_decay);
        not_negative("learning_rate_factor", p.learning_rate_factor);
        check_betas_and_epsilon(label(i, ""), p.beta1.value_or(0), p.beta2.value_or(0), p.epsilon.value_or(1));
        const auto add = [&](const char* name, uintptr_t pointer, Dtype dtype) {
            check_pointer(label(i, name), pointer, dtype);
            const auto num_bytes = static_cast<uintptr_t>(p.count * bytes_per_element(dtype));
            if (pointer > std::numeric_limits<uintptr_t>::max() - num_bytes) {
                throw std::invalid_argument(label(i, name) + " is " + hexadecimal(pointer) +
                                            "; the buffer would end beyond the address space");
            }
            ranges.push_back({pointer, pointer + num_bytes, i, name});
        };
        add("gradient", p.gradient, p.gradient_dtype);
        if (p.gradient2 != 0) add("gradient2", p.gradient2, p.gradient_dtype);
        add("master", p.master, Dtype::fp32);
        add("first_moment", p.first_moment, Dtype::fp32);
        add("second_moment", p.second_moment, Dtype::fp32);
        add("weight", p.weight, p.weight_dtype);
    }
    check_overlap(ranges);
}

}  // namespace spipe
