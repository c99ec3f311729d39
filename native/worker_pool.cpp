#include "worker_pool.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cfenv>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "usable_cores.hpp"

namespace spipe {
namespace {

double seconds_of_clock(clockid_t clock) {
    timespec time{};
    clock_gettime(clock, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

int checked_num_threads(int num_threads) {
    if (num_threads < 0 || num_threads > 4096) {
        throw std::invalid_argument("num_threads is " + std::to_string(num_threads) +
                                    "; it must be 0 (all usable cores) or between 1 and 4096");
    }
    return num_threads > 0 ? num_threads : usable_cores().usable;
}

}  // namespace

Job::Job(const std::vector<int64_t>& ends) : ranges_(ends.size()) {
    int64_t begin = 0;
    for (size_t domain = 0; domain < ends.size(); ++domain) {
        ranges_[domain].next.store(begin, std::memory_order_relaxed);
        ranges_[domain].end = begin = ends[domain];
    }
}

int64_t Job::claim(int domain) {
    const size_t count = ranges_.size();
    for (size_t k = 0; k < count; ++k) {
        Range& range = ranges_[(static_cast<size_t>(domain) + k) % count];
        if (range.next.load(std::memory_order_relaxed) >= range.end) continue;
        const int64_t chunk = range.next.fetch_add(1, std::memory_order_relaxed);
        if (chunk < range.end) return chunk;
    }
    return -1;
}

struct WorkerPool::State {
    const pid_t process = getpid();
    mutable std::mutex mutex;
    mutable std::condition_variable work_available;
    mutable std::condition_variable job_done;
    std::deque<std::shared_ptr<Job>> queue;
    bool closing = false;
    std::vector<std::thread> threads;
    std::vector<Domain> domains;
    std::vector<int> domain_of_worker;
    double cpu_seconds_of_ended_threads = 0;
};

WorkerPool::WorkerPool(int num_threads) : WorkerPool(num_threads, numa_domains()) {}

WorkerPool::WorkerPool(int num_threads, std::vector<Domain> domains) : state_(nullptr) {
    auto state = std::make_unique<State>();
    state->domain_of_worker = spread_over_domains(checked_num_threads(num_threads), domains);
    state->domains = std::move(domains);
    state_ = state.release();  // raw: a forked child must be able to leave it alone
    // Signals belong to the threads of the interpreter: workers start with all of them blocked.
    sigset_t all, previous;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &previous);
    try {
        for (int domain : state_->domain_of_worker) {
            state_->threads.emplace_back([shared = state_, domain] { work(*shared, domain); });
            pthread_setname_np(state_->threads.back().native_handle(), "spipe-adam");
        }
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &previous, nullptr);
        close();
        delete state_;
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &previous, nullptr);
}

WorkerPool::~WorkerPool() {
    if (getpid() != state_->process) return;
    close();
    delete state_;
}

int WorkerPool::num_threads() const {
    return static_cast<int>(state_->domain_of_worker.size());
}

const std::vector<Domain>& WorkerPool::domains() const {
    return state_->domains;
}

std::vector<int64_t> WorkerPool::split_over_domains(int64_t num_chunks) const {
    std::vector<int64_t> ends;
    int64_t workers = 0;
    for (size_t domain = 0; domain < state_->domains.size(); ++domain) {
        const auto& all = state_->domain_of_worker;
        workers += std::count(all.begin(), all.end(), static_cast<int>(domain));
        ends.push_back(num_chunks / num_threads() * workers + num_chunks % num_threads() * workers / num_threads());
    }
    return ends;
}

void WorkerPool::first_touch(char* memory, int64_t num_bytes) {
    // Whole huge pages: two threads that touch one at the same time would both make it, and one throw it away.
    constexpr uintptr_t piece_bytes = 2 << 20;
    constexpr uintptr_t page_bytes = 4096;
    class TouchJob final : public Job {
      public:
        TouchJob(const std::vector<int64_t>& ends, uintptr_t begin, uintptr_t end)
            : Job(ends), begin_(begin), end_(end) {}

      protected:
        void run(int64_t piece) override {
            const uintptr_t first = (begin_ / piece_bytes + static_cast<uintptr_t>(piece)) * piece_bytes;
            const uintptr_t last = std::min(end_, first + piece_bytes);
            for (uintptr_t page = std::max(first, begin_ / page_bytes * page_bytes); page < last; page += page_bytes) {
                volatile char* const byte = reinterpret_cast<char*>(std::max(page, begin_));
                *byte = *byte;
            }
        }

      private:
        const uintptr_t begin_;
        const uintptr_t end_;
    };
    if (num_bytes == 0) return;
    const auto begin = reinterpret_cast<uintptr_t>(memory);
    const uintptr_t end = begin + static_cast<uintptr_t>(num_bytes);
    const auto pieces = static_cast<int64_t>((end - 1) / piece_bytes - begin / piece_bytes + 1);
    auto job = std::make_shared<TouchJob>(split_over_domains(pieces), begin, end);
    submit(job);
    wait(*job);
}

double WorkerPool::cpu_seconds() const {
    require_same_process();
    std::lock_guard<std::mutex> lock(state_->mutex);
    double total = state_->cpu_seconds_of_ended_threads;
    for (std::thread& thread : state_->threads) {
        clockid_t clock;
        if (thread.joinable() && pthread_getcpuclockid(thread.native_handle(), &clock) == 0) {
            total += seconds_of_clock(clock);
        }
    }
    return total;
}

void WorkerPool::submit(std::shared_ptr<Job> job) {
    require_same_process();
    {
        std::lock_guard<std::mutex> lock(state_->mutex);
        if (state_->closing) throw std::runtime_error("the worker pool is closed: the process is ending");
        state_->queue.push_back(std::move(job));
    }
    state_->work_available.notify_one();  // workers wake each other, so that the caller does not pay for all of them
}

void WorkerPool::fail(Job& job, std::exception_ptr error) const {
    {
        std::lock_guard<std::mutex> lock(state_->mutex);
        job.error_ = std::move(error);
        job.done_ = true;
    }
    state_->job_done.notify_all();
}

void WorkerPool::wait(const Job& job) const {
    require_same_process();
    std::unique_lock<std::mutex> lock(state_->mutex);
    state_->job_done.wait(lock, [&] { return job.done_; });
}

void WorkerPool::close() {
    if (getpid() != state_->process) return;
    std::vector<std::thread> threads;
    {
        std::lock_guard<std::mutex> lock(state_->mutex);
        state_->closing = true;
        threads.swap(state_->threads);
    }
    state_->work_available.notify_all();
    for (std::thread& thread : threads) thread.join();
}

void WorkerPool::require_same_process() const {
    if (getpid() != state_->process) {
        throw std::runtime_error("this worker pool belongs to process " + std::to_string(state_->process) +
                                 " and its threads do not exist in the forked process " + std::to_string(getpid()) +
                                 "; spawn processes instead of forking them");
    }
}

void WorkerPool::work(State& state, int domain) {
    // A worker that wakes up must not take the core of the thread that has just submitted, or of one that feeds a GPU.
    const sched_param no_priority{};
    sched_setscheduler(0, SCHED_BATCH, &no_priority);
    if (state.domains.size() > 1) pin_to(state.domains[static_cast<size_t>(domain)]);
    // A new thread inherits the creator's flush-to-zero mode; results must not depend on who created the pool.
    std::fesetenv(FE_DFL_ENV);
    std::unique_lock<std::mutex> lock(state.mutex);
    while (true) {
        state.work_available.wait(lock, [&] { return state.closing || !state.queue.empty(); });
        if (state.queue.empty()) break;
        const std::shared_ptr<Job> job = state.queue.front();
        if (!job->started_) {
            job->started_ = true;
            job->start_ = std::chrono::steady_clock::now();
        }
        ++job->num_active_workers_;
        lock.unlock();
        state.work_available.notify_one();
        state.work_available.notify_one();
        const double cpu_start = seconds_of_clock(CLOCK_THREAD_CPUTIME_ID);
        work_on(state, *job, domain);
        const double cpu_seconds = seconds_of_clock(CLOCK_THREAD_CPUTIME_ID) - cpu_start;
        lock.lock();
        if (!state.queue.empty() && state.queue.front() == job) state.queue.pop_front();
        job->cpu_seconds_ += cpu_seconds;
        if (--job->num_active_workers_ == 0) {
            job->seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - job->start_).count();
            job->done_ = true;
            state.job_done.notify_all();
        }
    }
    state.cpu_seconds_of_ended_threads += seconds_of_clock(CLOCK_THREAD_CPUTIME_ID);
}

void WorkerPool::work_on(State& state, Job& job, int domain) {
    for (int64_t chunk; (chunk = job.claim(domain)) >= 0;) {
        if (job.failed_.load(std::memory_order_relaxed)) continue;
        try {
            job.run(chunk);
        } catch (...) {
            job.failed_.store(true, std::memory_order_relaxed);
            std::lock_guard<std::mutex> lock(state.mutex);
            if (job.error_ == nullptr) job.error_ = std::current_exception();
        }
    }
}

}  // namespace spipe
