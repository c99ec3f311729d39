// How many cores this process may really use, whatever launchers put into environment variables.
#pragma once

namespace spipe {

struct UsableCores {
    int affinity;  // cores in the scheduling mask (taskset, cpuset)
    int cgroup;    // whole cores of the tightest CPU quota above this process, at least 1; 0 if there is no quota
    int usable;    // the smaller of the two
};

UsableCores usable_cores();

}  // namespace spipe
