// Threads that process jobs first-in first-out; every job may use all of them.
//
// On a machine with several NUMA domains each worker stays on the cores of one. A job's chunks are then claimed by
// domain: a worker takes those of its own domain first and helps the others after that.
//
// Invariant: a job is in the queue exactly as long as it may have unclaimed chunks, and it is done when it has left
// the queue and no worker is inside it. The next job starts while the last chunks of the one before still run.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include "numa.hpp"

namespace spipe {

class WorkerPool;

// A piece of work cut into chunks that may run in any order and on any thread.
class Job {
  public:
    explicit Job(int64_t num_chunks) : Job(std::vector<int64_t>{num_chunks}) {}
    // Chunks [ends[d - 1], ends[d]) belong to domain d; domains beyond the list have none.
    explicit Job(const std::vector<int64_t>& ends);
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
    struct alignas(64) Range {
        std::atomic<int64_t> next{0};
        int64_t end = 0;
    };
    // The next chunk for a worker of this domain, -1 if none is left.
    int64_t claim(int domain);

    std::vector<Range> ranges_;  // of each domain
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
    // The same with pretended domains, for tests.
    WorkerPool(int num_threads, std::vector<Domain> domains);
    // Finishes the queue and joins. In a forked child, where the threads do not exist, it leaves everything alone.
    ~WorkerPool();
    WorkerPool(const WorkerPool&) = delete;
    WorkerPool& operator=(const WorkerPool&) = delete;

    int num_threads() const;
    const std::vector<Domain>& domains() const;
    // Cuts this many chunks, in order, in proportion to the workers of each domain: the ends for Job.
    std::vector<int64_t> split_over_domains(int64_t num_chunks) const;
    // CPU time that all worker threads have used since they started.
    double cpu_seconds() const;

    // Writes one byte of every page back, so that pages which do not exist yet come to lie in the domain of the workers
    // that will get them in a job that is split in proportion. Keeps the content.
    void first_touch(char* memory, int64_t num_bytes);

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
    static void work(State& state, int domain);
    static void work_on(State& state, Job& job, int domain);
    State* state_;
};

}  // namespace spipe
