#include <pybind11/numpy.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "flags.hpp"

namespace py = pybind11;

namespace spipe {
namespace {

struct Aborted : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Runs signal handlers between sleeps, so that Ctrl-C ends a wait. Only the main thread runs them; the others never
// ask for the interpreter while they wait.
void check_signals() {
    if (gettid() != getpid()) return;
    const py::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

bool wait_for(Flags& flags, const std::vector<int64_t>& indices, const std::vector<int64_t>& values, double timeout_s,
              int64_t abort_index) {
    WaitResult result{};
    {
        const py::gil_scoped_release release;
        result = flags.wait(indices, values, timeout_s, abort_index, check_signals);
    }
    if (result == WaitResult::aborted) {
        throw Aborted("the wait was aborted: flag " + std::to_string(abort_index) + " is set");
    }
    return result == WaitResult::reached;
}

using IntegerArray = py::array_t<int64_t, py::array::c_style>;

std::vector<int64_t> to_vector(const char* argument, const IntegerArray& array) {
    if (array.ndim() != 1) {
        throw std::invalid_argument(std::string(argument) + " has " + std::to_string(array.ndim()) +
                                    " dimensions; it must be a sequence of integers");
    }
    return {array.data(), array.data() + array.size()};
}

}  // namespace

void bind_flags(py::module_& module) {
    py::register_exception<Aborted>(module, "AbortedError", PyExc_RuntimeError).doc() =
        "A wait ended because its abort flag is set.";
    py::class_<Flags> flags(module, "Flags",
                            R"(Completion flags in memory shared by processes and threads of one host.

A flag is a 32-bit counter that only grows. `Flags(pointer, count)` views `count * BYTES_PER_FLAG` bytes at an address
aligned to 8 bytes; the memory must be zero at first (a new memfd is) and stay mapped. What a thread wrote before
`set` is visible to a thread whose `wait` returned True.
Raises ValueError for a null or misaligned pointer or a count below 1; every method raises IndexError for a flag that
does not exist.)");
    flags.attr("BYTES_PER_FLAG") = Flags::bytes_per_flag;
    flags.def(py::init<uintptr_t, int64_t>(), py::arg("pointer"), py::arg("count"))
        .def("__len__", &Flags::count, "Number of flags.")
        .def("get", &Flags::get, py::arg("index"), "The present value of a flag.")
        .def("set", &Flags::set, py::arg("index"), py::arg("value"),
             R"(Raises a flag to `value` and wakes who waits for it; no system call if nobody does.

Raises ValueError if the value is lower than the present one or does not fit in 32 bits.)")
        .def("abort", &Flags::abort, py::arg("abort_index"), py::call_guard<py::gil_scoped_release>(),
             "Sets flag `abort_index` to 1 (unless it is higher) and wakes every waiter of every flag.")
        .def("clear", &Flags::clear, "Sets every flag back to 0; only while no thread of any process waits.")
        .def(
            "wait",
            [](Flags& self, int64_t index, int64_t value, double timeout_s, int64_t abort_index) {
                return wait_for(self, {index}, {value}, timeout_s, abort_index);
            },
            py::arg("index"), py::arg("value"), py::arg("timeout_s"), py::arg("abort_index") = -1,
            R"(Waits until flag `index` is at least `value`; False if that takes longer than `timeout_s` seconds.

The GIL is released. `timeout_s` may be infinite. With `abort_index` >= 0, raises AbortedError as soon as that flag is
not 0 (at once after `abort`, within 50 ms after `set`). Ctrl-C ends a wait of the main thread.
Raises ValueError for a negative timeout.)")
        .def(
            "wait_many",
            [](Flags& self, const IntegerArray& indices, const IntegerArray& values, double timeout_s,
               int64_t abort_index) {
                const std::vector<int64_t> flag_indices = to_vector("indices", indices);
                return wait_for(self, flag_indices, to_vector("values", values), timeout_s, abort_index);
            },
            py::arg("indices"), py::arg("values"), py::arg("timeout_s"), py::arg("abort_index") = -1,
            R"(Waits until every flag indices[i] is at least values[i]; otherwise like `wait`.

Both are equally long sequences or arrays of integers, shape (num_flags,).)");
}

}  // namespace spipe
