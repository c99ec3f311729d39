// Which cores share memory: the NUMA domains among the cores that this process may use.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace spipe {

// Numbers of the cores of one domain, ascending, never empty.
struct Domain {
    int node;  // the kernel's number
    std::vector<int> cores;
};

// At least one; the only one has no cores listed if the kernel does not tell.
std::vector<Domain> numa_domains();

// "0-3,8" as numbers; throws std::invalid_argument for anything else.
std::vector<int> core_list(const std::string& text);

// The domain of each of num_workers workers: in proportion to the cores of the domains.
std::vector<int> spread_over_domains(int num_workers, const std::vector<Domain>& domains);

// Node of the page at each address; -1 where there is no page yet or the kernel does not tell.
std::vector<int> nodes_of_pages(const std::vector<uintptr_t>& addresses);

// Restricts the calling thread to the cores of a domain. Does nothing if that is refused.
void pin_to(const Domain& domain);

}  // namespace spipe
