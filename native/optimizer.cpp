#include "optimizer.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "step_job.hpp"
#include "tuning.hpp"

namespace spipe {
namespace {

enum class State { idle, submitted, joining, stepped, rolling_back, committing };
const char* const state_names[] = {"idle", "submitted", "joining", "stepped", "rolling back", "committing"};

constexpr int64_t bytes_of_traffic = 28;  // an element, with half gradients and weights

}  // namespace

struct Optimizer::Bucket {
    Bucket(std::vector<Parameter> parameters, const Hyperparameters& common, int num_threads)
        : data(std::move(parameters), common, num_threads) {}

    void require_state(int64_t number, const char* action, State wanted) const {
        if (state == wanted) return;
        throw std::logic_error(std::string("cannot ") + action + " bucket " + std::to_string(number) + ": it is " +
                               state_names[static_cast<int>(state)] + ", and must be " +
                               state_names[static_cast<int>(wanted)]);
    }

    std::vector<double> sums_of_squares() const {
        std::vector<double> sums(data.parameters.size());
        for (size_t p = 0; p < sums.size(); ++p) {
            for (int64_t block = data.index.first_block_of(p); block < data.index.first_block_of(p + 1); ++block) {
                sums[p] += data.block_sums[static_cast<size_t>(block)];
            }
        }
        return sums;
    }

    BucketData data;
    State state = State::idle;
    SubmitOptions options;
    std::shared_ptr<StepJob> job;
};

Optimizer::Optimizer(std::shared_ptr<WorkerPool> pool, const OptimizerOptions& options)
    : pool_(std::move(pool)), options_(options), rollback_(options.rollback) {
    if (pool_ == nullptr) throw std::invalid_argument("pool is None; it must be a WorkerPool");
    check_betas_and_epsilon("", options.beta1, options.beta2, options.epsilon);
    if (options.undo_budget_bytes.value_or(0) < 0) {
        throw std::invalid_argument("undo_budget_bytes is " + std::to_string(*options.undo_budget_bytes) +
                                    "; it must not be negative");
    }
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
    const Hyperparameters common{options_.beta1, options_.beta2, options_.epsilon, 0, 0, 1};
    auto bucket = std::make_unique<Bucket>(std::move(parameters), common, pool_->num_threads());
    std::lock_guard<std::mutex> lock(mutex_);
    num_elements_ += bucket->data.index.num_elements();
    for (const Parameter& p : bucket->data.parameters) {
        if (p.beta1.value_or(options_.beta1) == 0 || p.beta2.value_or(options_.beta2) == 0) some_beta_is_zero_ = true;
    }
    buckets_.push_back(std::move(bucket));
    return static_cast<int>(buckets_.size()) - 1;
}

void Optimizer::prepare(bool speculative) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t number = 0; number < buckets_.size(); ++number) {
        buckets_[number]->require_state(static_cast<int64_t>(number), "prepare", State::idle);
    }
    if (speculative) settle_rollback();
    for (const auto& bucket : buckets_) {
        BucketData& data = bucket->data;
        if (speculative) allocate_undo(data);
        data.first_touch(*pool_);
        if (!data.placed) data.place(*pool_);
    }
}

void Optimizer::allocate_undo(BucketData& data) const {
    data.undo.allocate(rollback_, data.index, data.num_chunks(), options_.stochastic_rounding);
}

void Optimizer::settle_rollback() {
    if (rollback_ != Rollback::automatic) return;
    const int64_t budget = options_.undo_budget_bytes ? *options_.undo_budget_bytes : default_undo_budget_bytes();
    rollback_ = choose_rollback(num_elements_, some_beta_is_zero_, budget);
}

// With the options that the bucket holds. The caller has the lock.
std::shared_ptr<StepJob> Optimizer::make_job(Bucket& bucket, bool speculative) const {
    const Tuning choice = tuning();
    const bool beyond_caches = num_elements_ * bytes_of_traffic > cache_bytes() / 2;
    StepPlan plan;
    if (speculative && rollback_ == Rollback::defer) {
        plan.inspect_only = true;
    } else if (speculative) {
        plan.undo = rollback_;
    }
    plan.with_sums = bucket.options.statistics;
    plan.stochastic = options_.stochastic_rounding;
    plan.random_seed = step_seed(options_.seed, bucket.options.step.step);
    plan.stream_state = choice.stores == Stores::all;
    plan.stream_weight = choice.stores == Stores::automatic ? beyond_caches : choice.stores != Stores::plain;
    plan.stream_undo = choice.stream_undo;
    plan.prefetch_elements = choice.prefetch_elements;
    return std::make_shared<StepJob>(bucket.data, plan, *pool_);
}

void Optimizer::submit(int64_t number, const SubmitOptions& options) {
    const StepOptions& step = options.step;
    require(step.step >= 1, "step", static_cast<double>(step.step), "at least 1");
    require(step.learning_rate >= 0 && !std::isinf(step.learning_rate), "learning_rate", step.learning_rate,
            "finite and not negative");
    require(std::isfinite(step.gradient_scale), "gradient_scale", step.gradient_scale, "finite");
    if (options.event != 0) waiter_.require_driver(options.event);
    std::lock_guard<std::mutex> lock(mutex_);
    Bucket& bucket = at(number);
    bucket.require_state(number, "submit", State::idle);
    BucketData& data = bucket.data;
    if (options.speculative) {
        settle_rollback();
        allocate_undo(data);
    }
    if (options.statistics) data.block_sums.resize(static_cast<size_t>(data.index.num_blocks()));
    data.scalars = data.groups.scalars(options_.bias_correction, step);
    std::fill(data.outcomes.begin(), data.outcomes.end(), Outcome::untouched);
    bucket.options = options;
    auto job = make_job(bucket, options.speculative);
    waiter_.submit(*pool_, job, options.event);
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
    StepResult result{job->bypassed() > 0, job->seconds(), job->cpu_seconds(), job->bypassed(), {}};
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (bucket->options.statistics) result.sums_of_squares = bucket->sums_of_squares();
        if (!bucket->data.placed) bucket->data.place(*pool_);
        bucket->job.reset();
        bucket->state = bucket->options.speculative ? State::stepped : State::idle;
    }
    if (job->error() != nullptr) std::rethrow_exception(job->error());
    return result;
}

void Optimizer::rollback(int number) {
    std::shared_ptr<RollbackJob> job;
    Bucket* bucket = nullptr;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        bucket = &at(number);
        bucket->require_state(number, "roll back", State::stepped);
        if (rollback_ == Rollback::defer) {
            bucket->state = State::idle;
            return;
        }
        job = std::make_shared<RollbackJob>(bucket->data, rollback_, options_.stochastic_rounding, *pool_);
        pool_->submit(job);
        bucket->state = State::rolling_back;
    }
    pool_->wait(*job);
    std::lock_guard<std::mutex> lock(mutex_);
    // After a failure, blocks that were restored are marked as untouched, so that it can be called again.
    bucket->state = job->error() == nullptr ? State::idle : State::stepped;
    if (job->error() != nullptr) std::rethrow_exception(job->error());
}

void Optimizer::commit(int number) {
    std::shared_ptr<StepJob> job;
    Bucket* bucket = nullptr;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        bucket = &at(number);
        bucket->require_state(number, "commit", State::stepped);
        if (rollback_ != Rollback::defer) {
            bucket->state = State::idle;
            return;
        }
        job = make_job(*bucket, false);
        pool_->submit(job);
        bucket->job = job;
        bucket->state = State::committing;
    }
    pool_->wait(*job);
    std::lock_guard<std::mutex> lock(mutex_);
    bucket->job.reset();
    bucket->state = State::idle;
    if (job->error() != nullptr) std::rethrow_exception(job->error());
}

int Optimizer::num_buckets() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int>(buckets_.size());
}

const char* Optimizer::state(int number) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return state_names[static_cast<int>(at(number).state)];
}

const char* Optimizer::rollback_name() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return name_of_rollback(rollback_);
}

int64_t Optimizer::undo_bytes() const {
    std::lock_guard<std::mutex> lock(mutex_);
    int64_t total = 0;
    for (const auto& bucket : buckets_) total += bucket->data.undo.num_bytes(bucket->job == nullptr);
    return total;
}

int64_t Optimizer::logged_bytes(int number) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const Bucket& bucket = at(number);
    bucket.require_state(number, "read the log of", State::stepped);
    return bucket.data.undo.logged_bytes();
}

void Optimizer::fail_at_block(int number, int64_t block) {
    std::lock_guard<std::mutex> lock(mutex_);
    at(number).data.fail_at_block = block;
}

Optimizer::Bucket& Optimizer::at(int64_t number) const {
    if (number < 0 || static_cast<size_t>(number) >= buckets_.size()) {
        throw std::out_of_range("bucket " + std::to_string(number) + " is unknown; this optimizer has " +
                                std::to_string(buckets_.size()) + " buckets, numbered from 0");
    }
    return *buckets_[static_cast<size_t>(number)];
}

}  // namespace spipe
