#include "instruction_set.hpp"

#include <atomic>
#include <stdexcept>

namespace spipe {
namespace {

const char* const names[] = {"baseline", "avx2", "avx512"};

bool is_available(InstructionSet set) {
    if (set == InstructionSet::baseline) return true;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (set == InstructionSet::avx2) return __builtin_cpu_supports("avx2");
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
    return false;
#endif
}

InstructionSet widest() {
    for (InstructionSet set : {InstructionSet::avx512, InstructionSet::avx2}) {
        if (is_available(set)) return set;
    }
    return InstructionSet::baseline;
}

std::atomic<InstructionSet>& selected() {
    static std::atomic<InstructionSet> set{widest()};
    return set;
}

}  // namespace

std::vector<std::string> available_instruction_sets() {
    std::vector<std::string> found;
    for (InstructionSet set : {InstructionSet::baseline, InstructionSet::avx2, InstructionSet::avx512}) {
        if (is_available(set)) found.emplace_back(names[static_cast<int>(set)]);
    }
    return found;
}

InstructionSet instruction_set() {
    return selected().load(std::memory_order_relaxed);
}

std::string instruction_set_name() {
    return names[static_cast<int>(instruction_set())];
}

void set_instruction_set(const std::string& name) {
    std::string allowed;
    for (InstructionSet set : {InstructionSet::baseline, InstructionSet::avx2, InstructionSet::avx512}) {
        if (!is_available(set)) continue;
        const std::string candidate = names[static_cast<int>(set)];
        if (candidate == name) {
            selected().store(set, std::memory_order_relaxed);
            return;
        }
        allowed += (allowed.empty() ? "" : ", ") + candidate;
    }
    throw std::invalid_argument("name is '" + name + "'; this machine has: " + allowed);
}

}  // namespace spipe
