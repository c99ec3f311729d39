#include "gradient_statistics.hpp"

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <vector>

#include "adam_kernel.hpp"
#include "parameter.hpp"

namespace spipe {
namespace {

// A chain of additions in order is bound by latency; eight independent blocks at once hide it without changing a bit.
constexpr int num_chains = 8;

template <typename Element, bool two>
float load_sum(const void* gradient, const void* gradient2, int64_t i) {
    using Storage = typename Element::Storage;
    const float value = Element::load(static_cast<const Storage*>(gradient)[i]);
    if constexpr (two) return value + Element::load(static_cast<const Storage*>(gradient2)[i]);
    (void)gradient2;
    return value;
}

template <typename Element, bool two, int chains>
void sum_blocks(const void* gradient, const void* gradient2, int64_t first, int64_t block_count, double* sums) {
    double chain[chains] = {};
    for (int64_t i = 0; i < block_count; ++i) {
        for (int c = 0; c < chains; ++c) {
            const double value = load_sum<Element, two>(gradient, gradient2, first + c * block_elements + i);
            chain[c] += value * value;  // exact product: fp32 has 24 bits, fp64 has 53
        }
    }
    std::copy(chain, chain + chains, sums);
}

template <typename Element, bool two>
void sum_group(const void* gradient, const void* gradient2, int64_t count, int64_t group, double* sums) {
    const int64_t first_block = group * num_chains;
    const int64_t first = first_block * block_elements;
    if (first + num_chains * block_elements <= count) {
        sum_blocks<Element, two, num_chains>(gradient, gradient2, first, block_elements, sums + first_block);
        return;
    }
    for (int64_t begin = first, block = first_block; begin < count; begin += block_elements, ++block) {
        sum_blocks<Element, two, 1>(gradient, gradient2, begin, std::min(block_elements, count - begin), sums + block);
    }
}

using SumGroup = void (*)(const void*, const void*, int64_t, int64_t, double*);

SumGroup function_for(Dtype dtype, bool two) {
    static constexpr SumGroup functions[3][2] = {{sum_group<Fp32, false>, sum_group<Fp32, true>},
                                                 {sum_group<Bf16, false>, sum_group<Bf16, true>},
                                                 {sum_group<Fp16, false>, sum_group<Fp16, true>}};
    return functions[static_cast<int>(dtype)][two ? 1 : 0];
}

class StatisticsJob final : public Job {
  public:
    StatisticsJob(SumGroup function, const void* gradient, const void* gradient2, int64_t count, int64_t num_groups,
                  double* sums)
        : Job(num_groups),
          function_(function),
          gradient_(gradient),
          gradient2_(gradient2),
          count_(count),
          sums_(sums) {}

  protected:
    void run(int64_t group) override { function_(gradient_, gradient2_, count_, group, sums_); }

  private:
    const SumGroup function_;
    const void* const gradient_;
    const void* const gradient2_;
    const int64_t count_;
    double* const sums_;
};

// The calling thread may have been set to flush denormals; the result must not depend on that.
class DefaultFloatingPoint {
  public:
    DefaultFloatingPoint() {
        std::fegetenv(&saved_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultFloatingPoint() { std::fesetenv(&saved_); }
    DefaultFloatingPoint(const DefaultFloatingPoint&) = delete;
    DefaultFloatingPoint& operator=(const DefaultFloatingPoint&) = delete;

  private:
    std::fenv_t saved_;
};

}  // namespace

GradientStatistics gradient_statistics(WorkerPool* pool, uintptr_t gradient, uintptr_t gradient2, Dtype dtype,
                                       int64_t count) {
    check_pointer("gradient", gradient, dtype);
    if (gradient2 != 0) check_pointer("gradient2", gradient2, dtype);
    check_count("count", count);
    const int64_t num_blocks = (count + block_elements - 1) / block_elements;
    const int64_t num_groups = (num_blocks + num_chains - 1) / num_chains;
    std::vector<double> sums(static_cast<size_t>(num_blocks));
    const SumGroup function = function_for(dtype, gradient2 != 0);
    const void* const first = reinterpret_cast<const void*>(gradient);
    const void* const second = reinterpret_cast<const void*>(gradient2);
    if (pool != nullptr) {
        auto job = std::make_shared<StatisticsJob>(function, first, second, count, num_groups, sums.data());
        pool->submit(job);
        pool->wait(*job);
    } else {
        const DefaultFloatingPoint guard;
        for (int64_t group = 0; group < num_groups; ++group) function(first, second, count, group, sums.data());
    }
    double total = 0;
    for (double sum : sums) total += sum;
    return {!std::isfinite(total), total};
}

}  // namespace spipe
