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
#include <optional>
#include <string>
#include <vector>

#include "event_waiter.hpp"
#include "hyperparameters.hpp"
#include "parameter.hpp"
#include "rollback.hpp"
#include "worker_pool.hpp"

namespace spipe {

struct OptimizerOptions {
    double beta1 = 0;
    double beta2 = 0;
    double epsilon = 0;
    bool bias_correction = true;
    bool stochastic_rounding = false;
    uint64_t seed = 0;
    Rollback rollback = Rollback::snapshot;
    std::optional<int64_t> undo_budget_bytes;  // what `automatic` may use; half of the available memory if not given
};

struct SubmitOptions {
    StepOptions step;
    bool speculative = false;
    bool statistics = false;  // also sum the squares of the gradients
    uintptr_t event = 0;      // CUDA event that the step waits for; 0 for none
};

struct StepResult {
    bool nonfinite;      // some block had a NaN or infinite gradient after scaling
    double seconds;      // wall clock, from the first worker's start to the last one's end
    double cpu_seconds;  // of all workers together
    int64_t bypassed;    // blocks left untouched because of a non-finite gradient
    // For each parameter, if asked for: of the gradients before scaling; NaN or infinite if they are.
    std::vector<double> sums_of_squares;
};

class StepJob;
struct BucketData;

class Optimizer {
  public:
    // Throws std::invalid_argument unless both betas are in [0, 1) and epsilon is positive and finite.
    Optimizer(std::shared_ptr<WorkerPool> pool, const OptimizerOptions& options);
    // Waits for what is still submitted.
    ~Optimizer();
    Optimizer(const Optimizer&) = delete;
    Optimizer& operator=(const Optimizer&) = delete;

    int add_bucket(std::vector<Parameter> parameters);
    // Makes all pages exist that steps of the present buckets touch, undo memory included if `speculative`.
    void prepare(bool speculative);
    void submit(int64_t bucket, const SubmitOptions& options);
    StepResult join(int bucket);
    void rollback(int bucket);
    void commit(int bucket);

    int num_buckets() const;
    const char* state(int bucket) const;
    const char* rollback_name() const;
    // Bytes held for undoing, of all buckets; and those that the last speculative step of one bucket needed.
    int64_t undo_bytes() const;
    int64_t logged_bytes(int bucket) const;
    // For tests: the next step of the bucket throws std::runtime_error when it reaches this block.
    void fail_at_block(int bucket, int64_t block);

  private:
    struct Bucket;
    Bucket& at(int64_t bucket) const;
    void settle_rollback();
    void allocate_undo(BucketData& data) const;
    std::shared_ptr<StepJob> make_job(Bucket& bucket, bool speculative) const;

    const std::shared_ptr<WorkerPool> pool_;
    const OptimizerOptions options_;
    mutable std::mutex mutex_;
    Rollback rollback_;  // `automatic` until the first speculative step or its preparation decides
    int64_t num_elements_ = 0;
    bool some_beta_is_zero_ = false;
    std::vector<std::unique_ptr<Bucket>> buckets_;
    EventWaiter waiter_;  // destroyed first: no job is handed to the pool after that
};

}  // namespace spipe
