#include "hyperparameters.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace spipe {

bool Hyperparameters::operator==(const Hyperparameters& other) const {
    return beta1 == other.beta1 && beta2 == other.beta2 && epsilon == other.epsilon &&
           weight_decay == other.weight_decay && l2_decay == other.l2_decay &&
           learning_rate_factor == other.learning_rate_factor;
}

AdamScalars adam_scalars(const Hyperparameters& group, bool bias_correction, const StepOptions& options) {
    const double t = static_cast<double>(options.step);
    const double learning_rate = options.learning_rate * group.learning_rate_factor;
    const double correction1 = bias_correction ? 1.0 - std::pow(group.beta1, t) : 1.0;
    const double correction2 = bias_correction ? std::sqrt(1.0 - std::pow(group.beta2, t)) : 1.0;
    AdamScalars scalars;
    scalars.gradient_scale = static_cast<float>(options.gradient_scale);
    scalars.beta1 = static_cast<float>(group.beta1);
    scalars.one_minus_beta1 = static_cast<float>(1.0 - group.beta1);
    scalars.beta2 = static_cast<float>(group.beta2);
    scalars.one_minus_beta2 = static_cast<float>(1.0 - group.beta2);
    // m / c1 / (sqrt(v) / c2 + epsilon) = (c2 / c1) m / (sqrt(v) + c2 epsilon): one division less for each element.
    scalars.step_size = static_cast<float>(learning_rate / correction1 * correction2);
    // Not 0, so that m = v = 0 gives 0 and not NaN.
    scalars.epsilon = std::max(static_cast<float>(group.epsilon * correction2), std::numeric_limits<float>::min());
    scalars.decay = static_cast<float>(1.0 - learning_rate * group.weight_decay);
    scalars.l2_decay = static_cast<float>(group.l2_decay);
    constexpr float biased = 1.0f - 0x1p-17f;  // 64 to 128 units in the last place less than 1
    scalars.inverse_beta1 = biased / scalars.beta1;
    scalars.inverse_beta2 = biased / scalars.beta2;
    scalars.inverse_decay = biased / scalars.decay;
    return scalars;
}

Groups::Groups(const std::vector<Parameter>& parameters, const Hyperparameters& common) {
    group_of_.reserve(parameters.size());
    for (const Parameter& p : parameters) {
        const Hyperparameters mine{p.beta1.value_or(common.beta1),
                                   p.beta2.value_or(common.beta2),
                                   p.epsilon.value_or(common.epsilon),
                                   p.weight_decay,
                                   p.l2_decay,
                                   p.learning_rate_factor};
        const auto found = std::find(groups_.begin(), groups_.end(), mine);
        group_of_.push_back(static_cast<uint32_t>(found - groups_.begin()));
        if (found == groups_.end()) groups_.push_back(mine);
    }
}

std::vector<AdamScalars> Groups::scalars(bool bias_correction, const StepOptions& options) const {
    std::vector<AdamScalars> result;
    result.reserve(groups_.size());
    for (const Hyperparameters& group : groups_) result.push_back(adam_scalars(group, bias_correction, options));
    return result;
}

}  // namespace spipe
