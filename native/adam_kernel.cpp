#include "adam_kernel.hpp"

#include <cmath>

namespace spipe {
namespace {

// The bodies below are inlined into one function per instruction set; only that function carries the target
// attribute, so no wide instruction can leak into code that runs on every machine.

template <typename Gradient>
SPIPE_INLINE bool scale_gradient_body(const void* gradient_bytes, const void* gradient2_bytes, float scale,
                                      float* __restrict scaled, int64_t count) {
    using Storage = typename Gradient::Storage;
    const Storage* __restrict gradient = static_cast<const Storage*>(gradient_bytes);
    const Storage* __restrict gradient2 = static_cast<const Storage*>(gradient2_bytes);
    uint32_t nonfinite = 0;
    if (gradient2 == nullptr) {
        for (int64_t i = 0; i < count; ++i) {
            const float value = Gradient::load(gradient[i]) * scale;
            scaled[i] = value;
            nonfinite |= (bits_of(value) & 0x7f800000u) == 0x7f800000u ? 1u : 0u;
        }
    } else {
        for (int64_t i = 0; i < count; ++i) {
            const float value = (Gradient::load(gradient[i]) + Gradient::load(gradient2[i])) * scale;
            scaled[i] = value;
            nonfinite |= (bits_of(value) & 0x7f800000u) == 0x7f800000u ? 1u : 0u;
        }
    }
    return nonfinite != 0;
}

template <typename Weight>
SPIPE_INLINE void step_body(const AdamScalars& scalars, float decay, const float* __restrict scaled,
                            float* __restrict master, float* __restrict first_moment, float* __restrict second_moment,
                            void* weight_bytes, int64_t count) {
    auto* __restrict weight = static_cast<typename Weight::Storage*>(weight_bytes);
    const AdamScalars s = scalars;
    for (int64_t i = 0; i < count; ++i) {
        const float g = scaled[i];
        const float m = s.beta1 * first_moment[i] + s.one_minus_beta1 * g;
        const float v = s.beta2 * second_moment[i] + s.one_minus_beta2 * (g * g);
        const float decayed = master[i] * decay;
        const float denominator = __builtin_sqrtf(v) / s.sqrt_bias_correction2 + s.epsilon;
        const float p = decayed - s.step_size * (m / denominator);
        first_moment[i] = m;
        second_moment[i] = v;
        master[i] = p;
        weight[i] = Weight::round(p);
    }
}

template <typename Weight>
SPIPE_INLINE void round_weight_body(const float* __restrict master, void* weight_bytes, int64_t count) {
    auto* __restrict weight = static_cast<typename Weight::Storage*>(weight_bytes);
    for (int64_t i = 0; i < count; ++i) weight[i] = Weight::round(master[i]);
}

#define SPIPE_KERNELS(NAME, TARGET)                                                                                    \
    namespace NAME {                                                                                                   \
    template <typename Gradient>                                                                                       \
    TARGET bool scale_gradient(const void* gradient, const void* gradient2, float scale, float* scaled,                \
                               int64_t count) {                                                                        \
        return scale_gradient_body<Gradient>(gradient, gradient2, scale, scaled, count);                               \
    }                                                                                                                  \
    template <typename Weight>                                                                                         \
    TARGET void step(const AdamScalars& scalars, float decay, const float* scaled, float* master, float* first_moment, \
                     float* second_moment, void* weight, int64_t count) {                                              \
        step_body<Weight>(scalars, decay, scaled, master, first_moment, second_moment, weight, count);                 \
    }                                                                                                                  \
    template <typename Weight>                                                                                         \
    TARGET void round_weight(const float* master, void* weight, int64_t count) {                                       \
        round_weight_body<Weight>(master, weight, count);                                                              \
    }                                                                                                                  \
    const AdamKernels kernels = {{scale_gradient<Fp32>, scale_gradient<Bf16>, scale_gradient<Fp16>},                   \
                                 {step<Fp32>, step<Bf16>, step<Fp16>},                                                 \
                                 {round_weight<Fp32>, round_weight<Bf16>, round_weight<Fp16>}};                        \
    }

SPIPE_KERNELS(baseline, )
#if defined(__x86_64__)
SPIPE_KERNELS(avx2, __attribute__((target("avx2"))))
SPIPE_KERNELS(avx512, __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512"))))
#endif

}  // namespace

AdamScalars adam_scalars(double beta1, double beta2, double epsilon, int64_t step, double learning_rate,
                         double gradient_scale) {
    const double t = static_cast<double>(step);
    AdamScalars scalars;
    scalars.gradient_scale = static_cast<float>(gradient_scale);
    scalars.beta1 = static_cast<float>(beta1);
    scalars.one_minus_beta1 = static_cast<float>(1.0 - beta1);
    scalars.beta2 = static_cast<float>(beta2);
    scalars.one_minus_beta2 = static_cast<float>(1.0 - beta2);
    scalars.step_size = static_cast<float>(learning_rate / (1.0 - std::pow(beta1, t)));
    scalars.sqrt_bias_correction2 = static_cast<float>(std::sqrt(1.0 - std::pow(beta2, t)));
    scalars.epsilon = static_cast<float>(epsilon);
    return scalars;
}

float decay_factor(double learning_rate, double weight_decay) {
    return static_cast<float>(1.0 - learning_rate * weight_decay);
}

const AdamKernels& adam_kernels(InstructionSet set) {
#if defined(__x86_64__)
    if (set == InstructionSet::avx512) return avx512::kernels;
    if (set == InstructionSet::avx2) return avx2::kernels;
#endif
    (void)set;
    return baseline::kernels;
}

}  // namespace spipe
