// Hands jobs to a worker pool once their CUDA events have happened, in the order of submission.
//
// The driver library is loaded at run time, so that nothing of CUDA is needed to build or, without events, to run. One
// thread waits with cuEventSynchronize; it sleeps if the events were created with blocking synchronisation.
#pragma once

#include <cstdint>
#include <memory>

#include "worker_pool.hpp"

namespace spipe {

class EventWaiter {
  public:
    EventWaiter() = default;
    // Waits for what is still queued. In a forked child, where the thread does not exist, it leaves everything alone.
    ~EventWaiter();
    EventWaiter(const EventWaiter&) = delete;
    EventWaiter& operator=(const EventWaiter&) = delete;

    // Throws std::runtime_error, naming the event, if the CUDA driver cannot be loaded.
    static void require_driver(uintptr_t event);
    // For tests: the library to load instead of libcuda.so.1; before the first event of the process.
    static void set_library(const char* path);

    // Hands the job over at once if event is 0 and no job is waiting, otherwise when its turn has come and the event
    // has happened. If the driver reports an error, that becomes the error of the job. One thread at a time.
    void submit(WorkerPool& pool, std::shared_ptr<Job> job, uintptr_t event);

  private:
    struct State;
    static void work(State& state);
    State* state_ = nullptr;  // raw: a forked child must be able to leave it alone
};

}  // namespace spipe
