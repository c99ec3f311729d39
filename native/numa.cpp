#include "numa.hpp"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>

#include "text.hpp"

namespace spipe {
namespace {

constexpr int max_cores = 1 << 16;

struct FreeMask {
    void operator()(cpu_set_t* mask) const { CPU_FREE(mask); }
};
using Mask = std::unique_ptr<cpu_set_t, FreeMask>;

Mask empty_mask() {
    Mask mask(CPU_ALLOC(max_cores));
    if (mask == nullptr) throw std::bad_alloc();
    CPU_ZERO_S(CPU_ALLOC_SIZE(max_cores), mask.get());
    return mask;
}

}  // namespace

std::vector<int> core_list(const std::string& text) {
    std::vector<int> cores;
    const char* place = text.c_str();
    while (*place != '\0' && *place != '\n') {
        char* end = nullptr;
        const long first = std::strtol(place, &end, 10);
        long last = first;
        bool valid = end != place && first >= 0;
        if (valid && *end == '-') {
            place = end + 1;
            last = std::strtol(place, &end, 10);
            valid = end != place && last >= first;
        }
        if (!valid || last >= max_cores || (*end != ',' && *end != '\0' && *end != '\n')) {
            throw std::invalid_argument("'" + text + "' is not a list of cores like 0-3,8");
        }
        for (long core = first; core <= last; ++core) cores.push_back(static_cast<int>(core));
        place = *end == ',' ? end + 1 : end;
    }
    return cores;
}

std::vector<Domain> numa_domains() {
    const Mask mask = empty_mask();
    const size_t mask_bytes = CPU_ALLOC_SIZE(max_cores);
    std::vector<Domain> domains;
    if (sched_getaffinity(0, mask_bytes, mask.get()) == 0) {
        const std::string folder = "/sys/devices/system/node/";
        for (int node : core_list(text_of_file(folder + "has_cpu"))) {
            Domain domain{node, {}};
            for (int core : core_list(text_of_file(folder + "node" + std::to_string(node) + "/cpulist"))) {
                if (CPU_ISSET_S(static_cast<size_t>(core), mask_bytes, mask.get())) domain.cores.push_back(core);
            }
            if (!domain.cores.empty()) domains.push_back(std::move(domain));
        }
    }
    if (domains.empty()) domains.push_back({0, {}});
    return domains;
}

std::vector<int> spread_over_domains(int num_workers, const std::vector<Domain>& domains) {
    std::vector<int> domain_of_core;
    for (size_t d = 0; d < domains.size(); ++d) {
        domain_of_core.insert(domain_of_core.end(), std::max<size_t>(domains[d].cores.size(), 1), static_cast<int>(d));
    }
    std::vector<int> domain_of_worker;
    for (int worker = 0; worker < num_workers; ++worker) {
        const size_t core = static_cast<size_t>(worker) * domain_of_core.size() / static_cast<size_t>(num_workers);
        domain_of_worker.push_back(domain_of_core[core]);
    }
    return domain_of_worker;
}

std::vector<int> nodes_of_pages(const std::vector<uintptr_t>& addresses) {
    std::vector<int> nodes(addresses.size(), -1);
#if defined(SYS_move_pages)
    if (syscall(SYS_move_pages, 0, addresses.size(), addresses.data(), nullptr, nodes.data(), 0) != 0) {
        nodes.assign(addresses.size(), -1);
    }
    for (int& node : nodes) node = std::max(node, -1);  // a negative error number: no page
#endif
    return nodes;
}

void pin_to(const Domain& domain) {
    const Mask mask = empty_mask();
    for (int core : domain.cores) CPU_SET_S(static_cast<size_t>(core), CPU_ALLOC_SIZE(max_cores), mask.get());
    sched_setaffinity(0, CPU_ALLOC_SIZE(max_cores), mask.get());
}

}  // namespace spipe
