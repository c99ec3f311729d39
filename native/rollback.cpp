#include "rollback.hpp"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <stdexcept>

#include "text.hpp"

namespace spipe {
namespace {

constexpr int64_t unlimited = std::numeric_limits<int64_t>::max();

int64_t available_in_meminfo() {
    const std::string text = text_of_file("/proc/meminfo");
    const size_t line = text.find("MemAvailable:");
    long long kibibytes = 0;
    if (line == std::string::npos || std::sscanf(text.c_str() + line, "MemAvailable: %lld", &kibibytes) != 1) {
        return unlimited;
    }
    return kibibytes * 1024;
}

// Of the control group of this process as it sees it (version 2): limit minus use.
int64_t available_in_group() {
    const std::string groups = text_of_file("/proc/self/cgroup");
    const size_t line = groups.find("0::");
    if (line == std::string::npos) return unlimited;
    const std::string folder = "/sys/fs/cgroup" + groups.substr(line + 3, groups.find('\n', line) - line - 3);
    long long limit = 0;
    long long use = 0;
    if (std::sscanf(text_of_file(folder + "/memory.max").c_str(), "%lld", &limit) != 1) return unlimited;  // "max"
    if (std::sscanf(text_of_file(folder + "/memory.current").c_str(), "%lld", &use) != 1) return unlimited;
    return std::max<int64_t>(limit - use, 0);
}

}  // namespace

Rollback rollback_of_name(const std::string& name) {
    for (Rollback rollback : {Rollback::snapshot, Rollback::delta, Rollback::defer, Rollback::automatic}) {
        if (name == name_of_rollback(rollback)) return rollback;
    }
    throw std::invalid_argument("rollback is '" + name + "'; it must be 'snapshot', 'delta', 'defer' or 'auto'");
}

const char* name_of_rollback(Rollback rollback) {
    static const char* const names[] = {"snapshot", "delta", "defer", "auto"};
    return names[static_cast<int>(rollback)];
}

Rollback choose_rollback(int64_t num_elements, bool some_beta_is_zero, int64_t budget_bytes) {
    const double elements = static_cast<double>(num_elements);
    const auto budget = static_cast<double>(budget_bytes);
    if (some_beta_is_zero) {
        return elements * snapshot_bytes_per_element <= budget ? Rollback::snapshot : Rollback::defer;
    }
    return elements * delta_bytes_per_element <= budget ? Rollback::delta : Rollback::defer;
}

int64_t default_undo_budget_bytes() {
    const int64_t available = std::min(available_in_meminfo(), available_in_group());
    return available == unlimited ? 0 : available / 2;
}

}  // namespace spipe
