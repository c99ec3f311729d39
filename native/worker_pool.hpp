// Threads that process jobs first-in first-out; every job may use all of them.
//
// Invariant: a job is in the queue exactly as long as it may have unclaimed chunks, and it is done when it has left
// the queue and no worker is inside it. The next job starts while the last chunks of the one before still run.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>

namespace spipe {

class WorkerPool;

// A piece of work cut into chunks that may run in any order and on any thread.
class Job {
  public:
    explicit Job(int64_t num_chunks) : num_chunks_(num_chunks) {}
    virtual ~Job() = default;
    Job(const Job&) = delete;
    Job& operator=(const Job&) = delete;

    // Valid once WorkerPool::wait returned: from the first chunk's start to the last one's end, and the CPU time that
    // all workers together spent in between on this job.
    double seconds() const { return seconds_; }
    double cpu_seconds() const { return cpu_seconds_; }
    // The first exception that a chunk threw (the chunks claimed after it are skipped), or null.
    std::exception_ptr error() const { return error_; }

  protected:
    // Called once for each chunk in [0, num_chunks). The floating-point environment is the default one.
    virtual void run(int64_t chunk) = 0;

  private:
    friend class WorkerPool;
    const int64_t num_chunks_;
    std::atomic<int64_t> next_chunk_{0};
    std::atomic<bool> failed_{false};
    // The rest is guarded by the mutex of the pool.
    int num_active_workers_ = 0;
    bool started_ = false;
    bool done_ = false;
    double seconds_ = 0;
    double cpu_seconds_ = 0;
    std::chrono::steady_clock::time_point start_;
    std::exception_ptr error_;
};

class WorkerPool {
  public:
    // 0 threads means: as many as there are usable cores. Throws std::invalid_argument if negative or above 4096.
    explicit WorkerPool(int num_threads);
    // Finishes the queue and joins. In a forked child, where the threads do not exist, it leaves everything alone.
    ~WorkerPool();
    WorkerPool(const WorkerPool&) = delete;
    WorkerPool& operator=(const WorkerPool&) = delete;

    int num_threads() const;
    // CPU time that all worker threads have used since they started.
    double cpu_seconds() const;

    // Returns at once. Throws std::runtime_error after close() and in a forked child.
    void submit(std::shared_ptr<Job> job);
    // Makes a job that was never submitted done, with this error.
    void fail(Job& job, std::exception_ptr error) const;
    // Blocks until the job is done. Does not throw the error of the job.
    void wait(const Job& job) const;
    // Finishes the queue and ends the threads; may be called twice.
    void close();

  private:
    struct State;
    void require_same_process() const;
    static void work(State& state);
    static void work_on(State& state, Job& job);
    State* state_;
};

}  // namespace spipe
