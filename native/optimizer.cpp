#include "optimizer.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <sstream>
#include <stdexcept>
#include <string>

#include "bucket.hpp"

namespace spipe {
namespace {

enum class State { idle, submitted, joining, stepped, rolling_back };
const char* const state_names[] = {"idle", "submitted", "joining", "stepped", "rolling back"};

// What the last step did to a block. Each entry is written by the one worker that has the block.
enum class Outcome : uint8_t { untouched, stepped, bypassed };

void require(bool condition, const char* argument, double value, const char* allowed) {
    if (condition) return;
    std::ostringstream text;
    text << argument << " is " << value << "; it must be " << allowed;
    throw std::invalid_argument(text.str());
}

std::vector<int64_t> element_counts(const std::vector<Parameter>& parameters) {
    std::vector<int64_t> counts;
    counts.reserve(parameters.size());
    for (const Parameter& parameter : parameters) counts.push_back(parameter.count);
    return counts;
}

// Large enough that claiming costs nothing, small enough that all workers end together.
int64_t blocks_per_chunk(int64_t num_blocks, int num_threads) {
    return std::clamp<int64_t>(num_blocks / (int64_t{8} * num_threads), 1, 16);
}

}  // namespace

struct Optimizer::Bucket {
    explicit Bucket(std::vector<Parameter> given)
        : parameters(std::move(given)),
          index(element_counts(parameters)),
          outcomes(static_cast<size_t>(index.num_blocks()), Outcome::untouched) {}

    void require_state(int number, const char* action, State wanted) const {
        if (state == wanted) return;
        throw std::logic_error(std::string("cannot ") + action + " bucket " + std::to_string(number) + ": it is " +
                               state_names[static_cast<int>(state)] + ", and must be " +
                               state_names[static_cast<int>(wanted)]);
    }

    const std::vector<Parameter> parameters;
    const BlockIndex index;
    std::vector<Outcome> outcomes;
    Snapshot snapshot;
    State state = State::idle;
    std::shared_ptr<StepJob> job;
    int64_t fail_at_block = -1;
};

class Optimizer::StepJob final : public Job {
  public:
    StepJob(Bucket& bucket, const AdamScalars& scalars, const StepOptions& options, int64_t chunk_blocks)
        : Job((bucket.index.num_blocks() + chunk_blocks - 1) / chunk_blocks),
          bucket_(bucket),
          scalars_(scalars),
          options_(options),
          kernels_(adam_kernels(instruction_set())),
          chunk_blocks_(chunk_blocks),
          fail_at_block_(bucket.fail_at_block) {
        bucket.fail_at_block = -1;
    }

    bool speculative() const { return options_.speculative; }
    int64_t bypassed() const { return bypassed_.load(); }

  protected:
    void run(int64_t chunk) override {
        const int64_t first = chunk * chunk_blocks_;
        const int64_t last = std::min(first + chunk_blocks_, bucket_.index.num_blocks()) - 1;
        Block block = bucket_.index.at(first);
        for (int64_t number = first;; ++number) {
            if (number == fail_at_block_) throw std::runtime_error("failure of a block, as a test asked for");
            bucket_.outcomes[static_cast<size_t>(number)] = step(block);
            if (number == last) return;
            block = bucket_.index.next(block);
        }
    }

  private:
    Outcome step(const Block& block) {
        const Parameter& p = bucket_.parameters[block.parameter];
        alignas(64) float scaled[block_elements];
        const void* const gradient = element_address(p.gradient, block.first, p.gradient_dtype);
        const void* const gradient2 =
            p.gradient2 == 0 ? nullptr : element_address(p.gradient2, block.first, p.gradient_dtype);
        if (kernels_.scale_gradient[static_cast<int>(p.gradient_dtype)](gradient, gradient2, scalars_.gradient_scale,
                                                                        scaled, block.count)) {
            bypassed_.fetch_add(1);
            return Outcome::bypassed;
        }
        if (options_.speculative) bucket_.snapshot.save(p, block);
        kernels_.step[static_cast<int>(p.weight_dtype)](
            scalars_, decay_factor(options_.learning_rate, p.weight_decay), scaled,
            element_pointer<float>(p.master, block.first), element_pointer<float>(p.first_moment, block.first),
            element_pointer<float>(p.second_moment, block.first),
            element_address(p.weight, block.first, p.weight_dtype), block.count);
        return Outcome::stepped;
    }

    Bucket& bucket_;
    const AdamScalars scalars_;
    const StepOptions options_;
    const AdamKernels& kernels_;
    const int64_t chunk_blocks_;
    const int64_t fail_at_block_;
    std::atomic<int64_t> bypassed_{0};
};

class Optimizer::RollbackJob final : public Job {
  public:
    RollbackJob(Bucket& bucket, int64_t chunk_blocks)
        : Job((bucket.index.num_blocks() + chunk_blocks - 1) / chunk_blocks),
          bucket_(bucket),
          kernels_(adam_kernels(instruction_set())),
          chunk_blocks_(chunk_blocks) {}

  protected:
    void run(int64_t chunk) override {
        const int64_t first = chunk * chunk_blocks_;
        const int64_t last = std::min(first + chunk_blocks_, bucket_.index.num_blocks()) - 1;
        Block block = bucket_.index.at(first);
        for (int64_t number = first;; ++number) {
            Outcome& outcome = bucket_.outcomes[static_cast<size_t>(number)];
            if (outcome == Outcome::stepped) {
                const Parameter& p = bucket_.parameters[block.parameter];
                bucket_.snapshot.restore(p, block);
                kernels_.round_weight[static_cast<int>(p.weight_dtype)](
                    element_pointer<float>(p.master, block.first),
                    element_address(p.weight, block.first, p.weight_dtype), block.count);
            }
            outcome = Outcome::untouched;
            if (number == last) return;
            block = bucket_.index.next(block);
        }
    }

  private:
    Bucket& bucket_;
    const AdamKernels& kernels_;
    const int64_t chunk_blocks_;
};

Optimizer::Optimizer(std::shared_ptr<WorkerPool> pool, double beta1, double beta2, double epsilon)
    : pool_(std::move(pool)), beta1_(beta1), beta2_(beta2), epsilon_(epsilon) {
    if (pool_ == nullptr) throw std::invalid_argument("pool is None; it must be a WorkerPool");
    require(beta1 >= 0 && beta1 < 1, "beta1", beta1, "in [0, 1)");
    require(beta2 >= 0 && beta2 < 1, "beta2", beta2, "in [0, 1)");
    require(epsilon > 0 && !std::isinf(epsilon), "epsilon", epsilon, "positive and finite");
}

Optimizer::~Optimizer() {
    for (const auto& bucket : buckets_) {
        if (bucket->job == nullptr) continue;
        try {
            pool_->wait(*bucket->job);
        } catch (const std::runtime_error&) {
            // A forked child has no workers, so nothing of this process can still be running.
        }
    }
}

int Optimizer::add_bucket(std::vector<Parameter> parameters) {
    check_bucket(parameters);
    auto bucket = std::make_unique<Bucket>(std::move(parameters));
    std::lock_guard<std::mutex> lock(mutex_);
    buckets_.push_back(std::move(bucket));
    return static_cast<int>(buckets_.size()) - 1;
}

void Optimizer::submit(int number, const StepOptions& options) {
    require(options.step >= 1, "step", static_cast<double>(options.step), "at least 1");
    require(options.learning_rate >= 0 && !std::isinf(options.learning_rate), "learning_rate", options.learning_rate,
            "finite and not negative");
    require(std::isfinite(options.gradient_scale), "gradient_scale", options.gradient_scale, "finite");
    const AdamScalars scalars =
        adam_scalars(beta1_, beta2_, epsilon_, options.step, options.learning_rate, options.gradient_scale);
    std::lock_guard<std::mutex> lock(mutex_);
    Bucket& bucket = at(number);
    bucket.require_state(number, "submit", State::idle);
    if (options.speculative) bucket.snapshot.allocate(bucket.index.num_elements());
    std::fill(bucket.outcomes.begin(), bucket.outcomes.end(), Outcome::untouched);
    const int64_t chunk_blocks = blocks_per_chunk(bucket.index.num_blocks(), pool_->num_threads());
    auto job = std::make_shared<StepJob>(bucket, scalars, options, chunk_blocks);
    pool_->submit(job);
    bucket.job = std::move(job);
    bucket.state = State::submitted;
}

StepResult Optimizer::join(int number) {
    std::shared_ptr<StepJob> job;
    Bucket* bucket = nullptr;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        bucket = &at(number);
        bucket->require_state(number, "join", State::submitted);
        bucket->state = State::joining;  // a second thread that joins the same bucket gets an error, not a race
        job = bucket->job;
    }
    pool_->wait(*job);
    {
        std::lock_guard<std::mutex> lock(mutex_);
        bucket->job.reset();
        bucket->state = job->speculative() ? State::stepped : State::idle;
    }
    if (job->error() != nullptr) std::rethrow_exception(job->error());
    return {job->bypassed() > 0, job->seconds(), job->cpu_seconds(), job->bypassed()};
}

void Optimizer::rollback(int number) {
    std::shared_ptr<RollbackJob> job;
    Bucket* bucket = nullptr;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        bucket = &at(number);
        bucket->require_state(number, "roll back", State::stepped);
        job =
            std::make_shared<RollbackJob>(*bucket, blocks_per_chunk(bucket->index.num_blocks(), pool_->num_threads()));
        pool_->submit(job);
        bucket->state = State::rolling_back;
    }
    pool_->wait(*job);
    std::lock_guard<std::mutex> lock(mutex_);
    bucket->state = State::idle;
}

void Optimizer::commit(int number) {
    std::lock_guard<std::mutex> lock(mutex_);
    Bucket& bucket = at(number);
    bucket.require_state(number, "commit", State::stepped);
    bucket.state = State::idle;
}

int Optimizer::num_buckets() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int>(buckets_.size());
}

const char* Optimizer::state(int number) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return state_names[static_cast<int>(at(number).state)];
}

int64_t Optimizer::snapshot_bytes() const {
    std::lock_guard<std::mutex> lock(mutex_);
    int64_t total = 0;
    for (const auto& bucket : buckets_) total += bucket->snapshot.num_bytes();
    return total;
}

void Optimizer::fail_at_block(int number, int64_t block) {
    std::lock_guard<std::mutex> lock(mutex_);
    at(number).fail_at_block = block;
}

Optimizer::Bucket& Optimizer::at(int number) const {
    if (number < 0 || static_cast<size_t>(number) >= buckets_.size()) {
        throw std::out_of_range("bucket " + std::to_string(number) + " is unknown; this optimizer has " +
                                std::to_string(buckets_.size()) + " buckets, numbered from 0");
    }
    return *buckets_[static_cast<size_t>(number)];
}

}  // namespace spipe
