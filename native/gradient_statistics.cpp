#include "gradient_statistics.hpp"

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <vector>

#include "adam_kernel.hpp"
#include "parameter.hpp"

namespace spipe {
namespace {

constexpr int64_t chunk_blocks = 16;

// The blocks of one gradient, without a bucket around it.
class StatisticsJob final : public Job {
  public:
    StatisticsJob(const void* gradient, const void* gradient2, Dtype dtype, int64_t count, std::vector<double>& sums)
        : Job((static_cast<int64_t>(sums.size()) + chunk_blocks - 1) / chunk_blocks),
          inspect_(adam_kernels(instruction_set()).inspect[static_cast<size_t>(dtype)]),
          gradient_(static_cast<const char*>(gradient)),
          gradient2_(static_cast<const char*>(gradient2)),
          element_bytes_(bytes_per_element(dtype)),
          count_(count),
          sums_(sums) {}

    void run_all() {
        for (int64_t chunk = 0; chunk * chunk_blocks < static_cast<int64_t>(sums_.size()); ++chunk) run(chunk);
    }

  protected:
    void run(int64_t chunk) override {
        const auto last = std::min((chunk + 1) * chunk_blocks, static_cast<int64_t>(sums_.size()));
        for (int64_t block = chunk * chunk_blocks; block < last; ++block) {
            const int64_t first = block * block_elements;
            BlockPointers at{};
            at.gradient = gradient_ + first * element_bytes_;
            at.gradient2 = gradient2_ == nullptr ? nullptr : gradient2_ + first * element_bytes_;
            at.count = std::min(block_elements, count_ - first);
            sums_[static_cast<size_t>(block)] = inspect_(at, 1.0f, true, false).sum_of_squares;
        }
    }

  private:
    Inspection (*const inspect_)(const BlockPointers&, float, bool, bool);
    const char* const gradient_;
    const char* const gradient2_;
    const int64_t element_bytes_;
    const int64_t count_;
    std::vector<double>& sums_;
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
    std::vector<double> sums(static_cast<size_t>(num_blocks));
    auto job = std::make_shared<StatisticsJob>(reinterpret_cast<const void*>(gradient),
                                               reinterpret_cast<const void*>(gradient2), dtype, count, sums);
    if (pool != nullptr) {
        pool->submit(job);
        pool->wait(*job);
    } else {
        const DefaultFloatingPoint guard;
        job->run_all();
    }
    double total = 0;
    for (double sum : sums) total += sum;
    return {!std::isfinite(total), total};
}

}  // namespace spipe
