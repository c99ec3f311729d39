#include "bindings.hpp"

#include <pybind11/stl.h>

#include <cstring>
#include <stdexcept>
#include <string>

#include "gradient_statistics.hpp"
#include "instruction_set.hpp"
#include "numa.hpp"
#include "parameter.hpp"
#include "usable_cores.hpp"

namespace py = pybind11;

namespace spipe {
namespace {

void copy(uintptr_t destination, uintptr_t source, int64_t num_bytes) {
    if (num_bytes < 0) {
        throw std::invalid_argument("num_bytes is " + std::to_string(num_bytes) + "; it must not be negative");
    }
    if (num_bytes == 0) return;
    if (destination == 0)
        throw std::invalid_argument("destination is 0 (null); it must be the address of a CPU buffer");
    if (source == 0) throw std::invalid_argument("source is 0 (null); it must be the address of a CPU buffer");
    const py::gil_scoped_release release;
    std::memmove(reinterpret_cast<void*>(destination), reinterpret_cast<const void*>(source),
                 static_cast<size_t>(num_bytes));
}

py::dict features() {
    const UsableCores cores = usable_cores();
    py::dict result;
    result["instruction_set"] = instruction_set_name();
    result["available_instruction_sets"] = available_instruction_sets();
    result["usable_cores"] = cores.usable;
    result["affinity_cores"] = cores.affinity;
    result["cgroup_cores"] = cores.cgroup > 0 ? py::object(py::int_(cores.cgroup)) : py::object(py::none());
    result["numa_domains"] = numa_domains().size();
    return result;
}

py::tuple statistics(WorkerPool* pool, uintptr_t gradient, const std::string& dtype, int64_t count,
                     uintptr_t gradient2) {
    const Dtype code = dtype_of_name("dtype", dtype);
    GradientStatistics result{};
    {
        const py::gil_scoped_release release;
        result = gradient_statistics(pool, gradient, gradient2, code, count);
    }
    return py::make_tuple(result.nonfinite, result.sum_of_squares);
}

}  // namespace
}  // namespace spipe

PYBIND11_MODULE(_native, module) {
    module.doc() =
        "CPU kernels of spipe: AdamW with its worker pool, gradient statistics, and completion flags between "
        "processes. Buffers are given as raw addresses and element types ('fp32', 'bf16', 'fp16'); the caller keeps "
        "them alive. Importing this module changes no floating-point mode of the process.";
    spipe::bind_optimizer(module);
    spipe::bind_flags(module);
    spipe::bind_benchmark(module);
    module.def("gradient_statistics", &spipe::statistics, py::arg("pool"), py::arg("gradient"), py::arg("dtype"),
               py::arg("count"), py::kw_only(), py::arg("gradient2") = 0,
               R"(Non-finite flag and sum of squares of `count` elements at address `gradient`.

Returns (nonfinite, sum_of_squares). The sum is fp64: every block of 4096 elements is summed in order and the block
sums are added in order, so the bits do not depend on the number of threads. It is NaN or infinite if `nonfinite`.
`pool` may be None: the calling thread then does the work. With `gradient2` (an address, 0 if none) the elements are
the fp32 sums of both gradients. Releases the GIL.
Raises ValueError for a null or misaligned address, an unknown dtype or a count below 1.)");
    module.def("_core_list", &spipe::core_list, py::arg("text"), "For tests: the numbers in a list like '0-3,8'.");
    module.def("copy", &spipe::copy, py::arg("destination"), py::arg("source"), py::arg("num_bytes"),
               R"(Copies `num_bytes` bytes between two addresses on the calling thread, with the GIL released.

The ranges may overlap. Raises ValueError for a null address or a negative size.)");
    module.def("features", &spipe::features,
               R"(What this machine offers to the kernels, as a dict.

instruction_set: the one in use; available_instruction_sets: names for `set_instruction_set`, slowest first;
affinity_cores: cores in the scheduling mask; cgroup_cores: whole cores of the CPU quota, None without a quota;
usable_cores: the smaller of the two, which is the size of `WorkerPool(0)`; numa_domains: those with usable cores.)");
    module.def("set_instruction_set", &spipe::set_instruction_set, py::arg("name"),
               R"(Selects the vector instructions that later jobs use; every choice gives the same bits.

Raises ValueError for a name that is not in features()["available_instruction_sets"].)");
}
