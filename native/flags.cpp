#include "flags.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

namespace spipe {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double slice_s = 0.05;
// About as long as going to sleep and being woken costs.
constexpr int num_spins = 200;

void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Shared futexes (no FUTEX_PRIVATE_FLAG): the word may be mapped at different addresses in different processes.
void futex_wait(std::atomic<uint32_t>* word, uint32_t seen, double seconds) {
    timespec duration{};
    duration.tv_sec = static_cast<time_t>(seconds);
    duration.tv_nsec = static_cast<long>((seconds - std::floor(seconds)) * 1e9);
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT, seen, &duration, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>* word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

uint32_t checked_value(const char* argument, int64_t value) {
    if (value < 0 || value > std::numeric_limits<uint32_t>::max()) {
        throw std::invalid_argument(std::string(argument) + " is " + std::to_string(value) +
                                    "; it must be between 0 and 2^32 - 1");
    }
    return static_cast<uint32_t>(value);
}

class Waiting {
  public:
    explicit Waiting(std::atomic<uint32_t>& num_waiters) : num_waiters_(num_waiters) { num_waiters_.fetch_add(1); }
    ~Waiting() { num_waiters_.fetch_sub(1); }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

  private:
    std::atomic<uint32_t>& num_waiters_;
};

}  // namespace

Flags::Flags(uintptr_t pointer, int64_t count) : flags_(reinterpret_cast<Flag*>(pointer)), count_(count) {
    if (pointer == 0 || pointer % bytes_per_flag != 0) {
        throw std::invalid_argument("pointer is " + std::to_string(pointer) +
                                    "; it must be the address of memory aligned to 8 bytes");
    }
    if (count < 1 || count > (int64_t{1} << 40)) {
        throw std::invalid_argument("count is " + std::to_string(count) + "; it must be between 1 and 2^40");
    }
}

uint32_t Flags::get(int64_t index) const {
    return at(index).value.load(std::memory_order_acquire);
}

void Flags::set(int64_t index, int64_t value) {
    Flag& flag = at(index);
    const uint32_t wanted = checked_value("value", value);
    uint32_t present = flag.value.load();
    do {
        if (present > wanted) {
            throw std::invalid_argument("value is " + std::to_string(wanted) + ", but flag " + std::to_string(index) +
                                        " is already " + std::to_string(present) + "; a flag only grows");
        }
    } while (!flag.value.compare_exchange_weak(present, wanted));
    if (flag.num_waiters.load() != 0) futex_wake_all(&flag.value);
}

void Flags::abort(int64_t abort_index) {
    Flag& flag = at(abort_index);
    uint32_t zero = 0;
    flag.value.compare_exchange_strong(zero, 1);
    for (int64_t i = 0; i < count_; ++i) {
        if (flags_[i].num_waiters.load() != 0) futex_wake_all(&flags_[i].value);
    }
}

void Flags::clear() {
    for (int64_t i = 0; i < count_; ++i) flags_[i].value.store(0);
}

WaitResult Flags::wait(const std::vector<int64_t>& indices, const std::vector<int64_t>& values, double timeout_s,
                       int64_t abort_index, const std::function<void()>& poll) {
    if (indices.size() != values.size()) {
        throw std::invalid_argument("indices has " + std::to_string(indices.size()) + " entries and values has " +
                                    std::to_string(values.size()) + "; they must be equally many");
    }
    if (!(timeout_s >= 0)) {
        throw std::invalid_argument("timeout_s is " + std::to_string(timeout_s) +
                                    "; it must not be negative (infinity waits forever)");
    }
    for (size_t i = 0; i < indices.size(); ++i) {
        at(indices[i]);
        checked_value("value", values[i]);
    }
    const std::atomic<uint32_t>* const abort_flag = abort_index < 0 ? nullptr : &at(abort_index).value;
    const auto aborted = [&] { return abort_flag != nullptr && abort_flag->load() != 0; };
    const Clock::time_point start = Clock::now();
    const auto remaining = [&] { return timeout_s - std::chrono::duration<double>(Clock::now() - start).count(); };
    if (aborted()) return WaitResult::aborted;
    for (size_t i = 0; i < indices.size(); ++i) {
        Flag& flag = at(indices[i]);
        const auto wanted = static_cast<uint32_t>(values[i]);
        const auto reached = [&] { return flag.value.load() >= wanted; };
        for (int spin = 0; spin < num_spins && timeout_s > 0 && !reached(); ++spin) pause_briefly();
        if (reached()) continue;
        const Waiting waiting(flag.num_waiters);
        for (bool slept = false;; slept = true) {
            const uint32_t seen = flag.value.load();
            if (seen >= wanted) break;
            if (aborted()) return WaitResult::aborted;
            if (slept) poll();
            const double left = remaining();
            if (left <= 0) return WaitResult::timed_out;
            futex_wait(&flag.value, seen, std::min(left, slice_s));
        }
    }
    return WaitResult::reached;
}

Flags::Flag& Flags::at(int64_t index) const {
    if (index < 0 || index >= count_) {
        throw std::out_of_range("flag " + std::to_string(index) + " does not exist; there are " +
                                std::to_string(count_) + " flags, numbered from 0");
    }
    return flags_[index];
}

}  // namespace spipe
