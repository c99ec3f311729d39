#include "event_waiter.hpp"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "text.hpp"

namespace spipe {
namespace {

// The three functions of the driver that are needed, with the types of cuda.h: CUresult is an enum, handles are
// pointers.
struct Driver {
    int (*event_synchronize)(void* event) = nullptr;
    int (*context_current)(void** context) = nullptr;
    int (*set_context)(void* context) = nullptr;
    std::string problem;
};

std::string& library_path() {
    static std::string path = "libcuda.so.1";
    return path;
}

template <typename Function>
void look_up(void* library, const char* name, Function& function, std::string& problem) {
    void* const symbol = dlsym(library, name);
    if (symbol == nullptr) {
        problem = "the CUDA driver has no function " + std::string(name);
    }
    function = reinterpret_cast<Function>(symbol);
}

Driver load_driver() {
    Driver driver;
    void* const library = dlopen(library_path().c_str(), RTLD_NOW | RTLD_LOCAL);  // stays open: never unloaded
    if (library == nullptr) {
        const char* const reason = dlerror();
        driver.problem = reason != nullptr ? reason : "the CUDA driver cannot be loaded";
        return driver;
    }
    look_up(library, "cuEventSynchronize", driver.event_synchronize, driver.problem);
    look_up(library, "cuCtxGetCurrent", driver.context_current, driver.problem);
    look_up(library, "cuCtxSetCurrent", driver.set_context, driver.problem);
    return driver;
}

const Driver& driver() {
    static const Driver loaded = load_driver();
    return loaded;
}

void check(int code, const char* function, uintptr_t event) {
    if (code == 0) return;
    throw std::runtime_error(std::string(function) + " failed with CUDA error " + std::to_string(code) + " for event " +
                             hexadecimal(event) + "; the step was not taken");
}

struct Waiting {
    WorkerPool* pool;
    std::shared_ptr<Job> job;
    uintptr_t event;
    void* context;  // of the thread that submitted
};

void wait_and_hand_over(const Waiting& waiting) {
    try {
        if (waiting.event != 0) {
            if (waiting.context != nullptr) {
                check(driver().set_context(waiting.context), "cuCtxSetCurrent", waiting.event);
            }
            check(driver().event_synchronize(reinterpret_cast<void*>(waiting.event)), "cuEventSynchronize",
                  waiting.event);
        }
        waiting.pool->submit(waiting.job);
    } catch (...) {
        waiting.pool->fail(*waiting.job, std::current_exception());
    }
}

}  // namespace

struct EventWaiter::State {
    const pid_t process = getpid();
    std::mutex mutex;
    std::condition_variable work_available;
    std::deque<Waiting> queue;  // the front is being waited for
    bool closing = false;
    std::thread thread;
};

EventWaiter::~EventWaiter() {
    if (state_ == nullptr || getpid() != state_->process) return;
    {
        std::lock_guard<std::mutex> lock(state_->mutex);
        state_->closing = true;
    }
    state_->work_available.notify_all();
    state_->thread.join();
    delete state_;
}

void EventWaiter::require_driver(uintptr_t event) {
    if (driver().problem.empty()) return;
    throw std::runtime_error("event is " + hexadecimal(event) + ", but " + driver().problem);
}

void EventWaiter::set_library(const char* path) {
    library_path() = path;
}

void EventWaiter::submit(WorkerPool& pool, std::shared_ptr<Job> job, uintptr_t event) {
    if (state_ == nullptr && event == 0) {
        pool.submit(std::move(job));
        return;
    }
    Waiting waiting{&pool, std::move(job), event, nullptr};
    if (event != 0) check(driver().context_current(&waiting.context), "cuCtxGetCurrent", event);
    if (state_ == nullptr) {
        auto state = std::make_unique<State>();
        sigset_t all, previous;  // signals belong to the threads of the interpreter
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &previous);
        try {
            state->thread = std::thread([shared = state.get()] { work(*shared); });
        } catch (...) {
            pthread_sigmask(SIG_SETMASK, &previous, nullptr);
            throw;
        }
        pthread_setname_np(state->thread.native_handle(), "spipe-events");
        pthread_sigmask(SIG_SETMASK, &previous, nullptr);
        state_ = state.release();
    }
    {
        std::lock_guard<std::mutex> lock(state_->mutex);
        if (event == 0 && state_->queue.empty()) {
            pool.submit(std::move(waiting.job));
            return;
        }
        state_->queue.push_back(std::move(waiting));
    }
    state_->work_available.notify_one();
}

void EventWaiter::work(State& state) {
    std::unique_lock<std::mutex> lock(state.mutex);
    while (true) {
        state.work_available.wait(lock, [&] { return state.closing || !state.queue.empty(); });
        if (state.queue.empty()) return;
        const Waiting waiting = state.queue.front();
        lock.unlock();
        wait_and_hand_over(waiting);
        lock.lock();
        state.queue.pop_front();
    }
}

}  // namespace spipe
