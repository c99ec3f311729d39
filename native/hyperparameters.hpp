// Hyper-parameters of a group of parameters, and the scalars that a step of them needs.
#pragma once

#include <cstdint>
#include <vector>

#include "adam_kernel.hpp"
#include "parameter.hpp"

namespace spipe {

struct Hyperparameters {
    double beta1;
    double beta2;
    double epsilon;
    double weight_decay;
    double l2_decay;
    double learning_rate_factor;

    bool operator==(const Hyperparameters& other) const;
};

struct StepOptions {
    int64_t step;  // 1-based, for the bias correction
    double learning_rate;
    double gradient_scale;  // factor on every gradient: 1 / loss scale, times the clip coefficient
};

AdamScalars adam_scalars(const Hyperparameters& group, bool bias_correction, const StepOptions& options);

// Parameters with equal hyper-parameters, so that a step computes its scalars once for each group.
class Groups {
  public:
    // The parameters' own values where they have some, `common` otherwise.
    Groups(const std::vector<Parameter>& parameters, const Hyperparameters& common);
    std::vector<AdamScalars> scalars(bool bias_correction, const StepOptions& options) const;
    size_t of(size_t parameter) const { return group_of_[parameter]; }

  private:
    std::vector<Hyperparameters> groups_;
    std::vector<uint32_t> group_of_;
};

}  // namespace spipe
