#include "bindings.hpp"
#include "stream_kernel.hpp"
#include "tuning.hpp"

namespace py = pybind11;

namespace spipe {
namespace {

template <typename Element>
Element* at(uintptr_t address) {
    return reinterpret_cast<Element*>(address);
}

double run(WorkerPool& pool, const std::string& name, uintptr_t gradient, uintptr_t master, uintptr_t first_moment,
           uintptr_t second_moment, uintptr_t weight, uintptr_t destination, int64_t count) {
    return run_streams(pool, name,
                       {at<const uint16_t>(gradient), at<float>(master), at<float>(first_moment),
                        at<float>(second_moment), at<uint16_t>(weight), at<float>(destination), count, 0, 3.0f});
}

void tune(const std::string& stores, int64_t prefetch_elements, int64_t chunk_blocks, bool stream_undo) {
    set_tuning({stores_of_name(stores), prefetch_elements, chunk_blocks, stream_undo});
}

}  // namespace

void bind_benchmark(py::module_& module) {
    const Tuning defaults;
    module.def("_set_tuning", &tune, py::kw_only(), py::arg("stores") = "auto",
               py::arg("prefetch_elements") = defaults.prefetch_elements,
               py::arg("chunk_blocks") = defaults.chunk_blocks, py::arg("stream_undo") = defaults.stream_undo,
               R"(For benchmarks: choices that change the speed of later steps and no bit of them.

stores: 'plain', 'weight' (the weight past the caches), 'all' (master and moments too), or 'auto' (plain or weight, by
size); prefetch_elements: how far reading runs ahead, a multiple of 64 up to 4096, 0 for not at all; chunk_blocks:
largest share of a worker in blocks of 4096 elements, for buckets added later; stream_undo: undo data past the caches.
Without arguments: the defaults.)");
    module.def("_run_streams", &run, py::arg("pool"), py::arg("name"), py::kw_only(), py::arg("gradient"),
               py::arg("master"), py::arg("first_moment"), py::arg("second_moment"), py::arg("weight"),
               py::arg("destination"), py::arg("count"), py::call_guard<py::gil_scoped_release>(),
               R"(For benchmarks: seconds that all workers need for loops that only move memory.

"streams", "streams_weight_nt", "streams_nt": the traffic of a step (2-byte gradient read, fp32 master and moments read
and written, 2-byte weight written), with plain stores, the weight past the caches, or everything past the caches;
master and moments keep their values. "triad", "triad_nt": destination = first_moment + 3 second_moment in fp32.
Addresses and count must be multiples of 64. Raises ValueError otherwise, and for another name.)");
}

}  // namespace spipe
