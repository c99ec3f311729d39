// Completion flags in memory that several processes and threads of one host share.
//
// A flag is a counter that only grows. Eight bytes each: the 32-bit value, which is also the futex word, and the
// number of waiters. Setter: store the value, then look for waiters. Waiter: announce itself, then look at the value.
// Both in sequentially consistent order, so that at least one of them sees the other: no wake-up is lost, and a set
// without waiters makes no system call.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

namespace spipe {

enum class WaitResult { reached, timed_out, aborted };

class Flags {
  public:
    static constexpr int64_t bytes_per_flag = 8;

    // The caller zeroes the memory once (a new memfd is zero), keeps it mapped, and gives every process the same
    // count. Throws std::invalid_argument for a null or not 8-byte aligned pointer or a count below 1.
    Flags(uintptr_t pointer, int64_t count);

    int64_t count() const { return count_; }
    uint32_t get(int64_t index) const;
    // Throws std::invalid_argument if the value is lower than the present one or does not fit in 32 bits.
    void set(int64_t index, int64_t value);
    // Sets the flag to 1 if it is 0, and wakes every waiter of every flag.
    void abort(int64_t abort_index);
    // Back to zero; only while nobody waits.
    void clear();

    // Returns once flag[indices[i]] >= values[i] for every i, or flag[abort_index] != 0 (checked before anything else,
    // and when woken or every 50 ms), or the time is over. abort_index < 0: none. `poll` is called between sleeps and
    // may throw.
    WaitResult wait(const std::vector<int64_t>& indices, const std::vector<int64_t>& values, double timeout_s,
                    int64_t abort_index, const std::function<void()>& poll);

  private:
    struct Flag {
        std::atomic<uint32_t> value;
        std::atomic<uint32_t> num_waiters;
    };
    static_assert(sizeof(Flag) == bytes_per_flag && std::atomic<uint32_t>::is_always_lock_free);

    Flag& at(int64_t index) const;
    Flag* const flags_;
    const int64_t count_;
};

}  // namespace spipe
