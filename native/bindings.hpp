// Each function adds one part of the module `spipe._native`. The bindings convert arguments and hold no arithmetic.
#pragma once

#include <pybind11/pybind11.h>

namespace spipe {

void bind_optimizer(pybind11::module_& module);
void bind_flags(pybind11::module_& module);
void bind_benchmark(pybind11::module_& module);

}  // namespace spipe
