// AdamW over buckets of parameters: asynchronous, optionally speculative, exactly undoable.
//
// States of a bucket:
//   idle --submit--> submitted --join--> idle                                (ordinary step)
//   idle --submit--> submitted --join--> stepped --commit or rollback--> idle (speculative step)
// Every other call throws and changes nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "parameter.hpp"
#include "worker_pool.hpp"

namespace spipe {

struct StepResult {
    bool nonfinite;      // some block had a NaN or infinite gradient after scaling
    double seconds;      // wall clock, from the first worker's start to the last one's end
    double cpu_seconds;  // of all workers together
    int64_t bypassed;    // blocks left untouched because of a non-finite gradient
};

struct StepOptions {
    int64_t step;  // 1-based, for the bias correction
    double learning_rate;
    double gradient_scale;  // factor on every gradient: 1 / loss scale, times the clip coefficient
    bool speculative;
};

class Optimizer {
  public:
    // Throws std::invalid_argument unless both betas are in [0, 1) and epsilon is positive and finite.
    Optimizer(std::shared_ptr<WorkerPool> pool, double beta1, double beta2, double epsilon);
    // Waits for what is still submitted.
    ~Optimizer();
    Optimizer(const Optimizer&) = delete;
    Optimizer& operator=(const Optimizer&) = delete;

    int add_bucket(std::vector<Parameter> parameters);
    void submit(int bucket, const StepOptions& options);
    StepResult join(int bucket);
    void rollback(int bucket);
    void commit(int bucket);

    int num_buckets() const;
    const char* state(int bucket) const;
    int64_t snapshot_bytes() const;
    // For tests: the next step of the bucket throws std::runtime_error when it reaches this block.
    void fail_at_block(int bucket, int64_t block);

  private:
    struct Bucket;
    class StepJob;
    class RollbackJob;
    Bucket& at(int bucket) const;

    const std::shared_ptr<WorkerPool> pool_;
    const double beta1_;
    const double beta2_;
    const double epsilon_;
    mutable std::mutex mutex_;
    std::vector<std::unique_ptr<Bucket>> buckets_;
};

}  // namespace spipe
