#include "usable_cores.hpp"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "text.hpp"

namespace spipe {
namespace {

int affinity_cores() {
    // The kernel refuses a mask smaller than its own, so grow until it fits.
    for (int num_cores = 1024; num_cores <= (1 << 20); num_cores *= 4) {
        cpu_set_t* mask = CPU_ALLOC(num_cores);
        if (mask == nullptr) break;
        const size_t num_bytes = CPU_ALLOC_SIZE(num_cores);
        const bool known = sched_getaffinity(0, num_bytes, mask) == 0;
        const int count = known ? CPU_COUNT_S(num_bytes, mask) : 0;
        CPU_FREE(mask);
        if (known) return std::max(count, 1);
    }
    return 1;
}

// Quota in cores of one group folder: version 2 (`cpu.max`) or version 1 (`cpu.cfs_*`); 0 if it sets none.
double quota_of_group(const std::string& folder) {
    double quota = 0;
    double period = 0;
    const std::string version2 = text_of_file(folder + "/cpu.max");  // "max 100000" or "200000 100000"
    if (std::sscanf(version2.c_str(), "%lf %lf", &quota, &period) != 2) {
        quota = std::atof(text_of_file(folder + "/cpu.cfs_quota_us").c_str());
        period = std::atof(text_of_file(folder + "/cpu.cfs_period_us").c_str());
    }
    return quota > 0 && period > 0 ? quota / period : 0.0;
}

bool contains_cpu(const std::string& controllers) {
    return ("," + controllers + ",").find(",cpu,") != std::string::npos;
}

int cgroup_cores() {
    double tightest = 0;
    const std::string groups = text_of_file("/proc/self/cgroup");
    for (size_t begin = 0, end; begin < groups.size(); begin = end + 1) {  // lines "hierarchy:controllers:/path"
        end = std::min(groups.find('\n', begin), groups.size());
        const std::string line = groups.substr(begin, end - begin);
        const size_t first = line.find(':');
        const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
        if (second == std::string::npos) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1);
        std::string root;
        if (controllers.empty()) {
            root = "/sys/fs/cgroup";
        } else if (contains_cpu(controllers)) {
            root = "/sys/fs/cgroup/cpu";
        } else {
            continue;
        }
        // A quota on any ancestor binds. Inside a container the path may not exist below the mount; its root then does.
        std::string path = line.substr(second + 1);
        while (true) {
            const double quota = quota_of_group(root + (path == "/" ? "" : path));
            if (quota > 0) tightest = tightest > 0 ? std::min(tightest, quota) : quota;
            if (path.empty() || path == "/") break;
            path.erase(path.rfind('/'));
        }
    }
    return tightest > 0 ? std::max(1, static_cast<int>(std::floor(tightest + 1e-9))) : 0;
}

}  // namespace

UsableCores usable_cores() {
    UsableCores cores{affinity_cores(), cgroup_cores(), 0};
    cores.usable = cores.cgroup > 0 ? std::min(cores.affinity, cores.cgroup) : cores.affinity;
    return cores;
}

}  // namespace spipe
