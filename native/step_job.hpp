// The work on one bucket: stepping it or only looking at its gradients, and undoing a step.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bucket.hpp"
#include "hyperparameters.hpp"
#include "worker_pool.hpp"

namespace spipe {

// What the last step did to a block. Each entry is written by the one worker that has the block.
enum class Outcome : uint8_t { untouched, stepped, bypassed };

// A bucket's fixed facts, and what the last step left behind. Only one job works on a bucket at a time.
struct BucketData {
    BucketData(std::vector<Parameter> given, const Hyperparameters& common, int num_threads);

    int64_t num_chunks() const { return (index.num_blocks() + chunk_blocks - 1) / chunk_blocks; }
    // Makes the pages of all buffers and of the undo memory exist, in the domains whose workers will get them.
    void first_touch(WorkerPool& pool) const;
    // Orders the chunks by the domain that their masters lie in, which is known once they were touched. Where there is
    // only one domain, or the kernel does not tell, the order stays as it is.
    void place(const WorkerPool& pool);
    // Place in that order -> chunk.
    int64_t chunk_at(int64_t place) const { return order.empty() ? place : order[static_cast<size_t>(place)]; }
    // Ends of the domains in that order.
    std::vector<int64_t> domain_ends(const WorkerPool& pool) const;

    const std::vector<Parameter> parameters;
    const BlockIndex index;
    const Groups groups;
    const int64_t chunk_blocks;
    std::vector<Outcome> outcomes;  // of each block
    UndoMemory undo;
    std::vector<AdamScalars> scalars;  // of each group, of the last step
    std::vector<double> block_sums;    // of squares of the gradients, if the last step was asked for them
    int64_t fail_at_block = -1;        // for tests
    bool placed = false;
    std::vector<int64_t> order;  // empty: as numbered
    std::vector<int64_t> ends;   // empty: in proportion to the workers
};

// How a job steps; Rollback::automatic means that no undo data is kept.
struct StepPlan {
    Rollback undo = Rollback::automatic;
    bool inspect_only = false;
    bool with_sums = false;
    bool stochastic = false;
    uint64_t random_seed = 0;  // of the step
    bool stream_weight = false;
    bool stream_state = false;
    bool stream_undo = false;
    int64_t prefetch_elements = 0;
};

class StepJob final : public Job {
  public:
    StepJob(BucketData& bucket, const StepPlan& plan, const WorkerPool& pool);
    int64_t bypassed() const { return bypassed_.load(); }

  protected:
    void run(int64_t place) override;

  private:
    Outcome step(int64_t number, int64_t chunk, const Block& block, const BlockPointers& at, const BlockPointers& next);
    bool inspect(int64_t number, const Parameter& parameter, const BlockPointers& at);

    BucketData& bucket_;
    const StepPlan plan_;
    const AdamKernels& kernels_;
    const int64_t fail_at_block_;
    std::atomic<int64_t> bypassed_{0};
};

class RollbackJob final : public Job {
  public:
    RollbackJob(BucketData& bucket, Rollback undo, bool with_weights, const WorkerPool& pool);

  protected:
    // Throws std::runtime_error for a block whose gradient has changed since the step; the block is left as it is.
    void run(int64_t place) override;

  private:
    void restore(const Block& block, int64_t number, const UndoLog* log);

    BucketData& bucket_;
    const Rollback undo_;
    const bool with_weights_;
    const AdamKernels& kernels_;
};

// Noise key of a block: a hash of the seed of the step, the parameter's stream and the block's place in the parameter.
uint64_t random_key(uint64_t step_seed, uint64_t stream, int64_t first_element);
// Seed of a step from the user's seed.
uint64_t step_seed(uint64_t seed, int64_t step);

}  // namespace spipe
