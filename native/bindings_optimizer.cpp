#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "bucket.hpp"
#include "optimizer.hpp"
#include "parameter.hpp"
#include "text.hpp"
#include "worker_pool.hpp"

namespace py = pybind11;

namespace spipe {
namespace {

std::shared_ptr<WorkerPool> make_pool(int num_threads, const std::optional<std::vector<std::string>>& pretended) {
    std::vector<Domain> domains;
    if (pretended) {
        for (const std::string& cores : *pretended)
            domains.push_back({static_cast<int>(domains.size()), core_list(cores)});
    } else {
        domains = numa_domains();
    }
    auto pool = std::make_shared<WorkerPool>(num_threads, std::move(domains));
    // Buffers are freed when the interpreter ends: finish what is queued before that.
    const std::weak_ptr<WorkerPool> weak = pool;
    py::module_::import("atexit").attr("register")(py::cpp_function([weak] {
        if (const auto alive = weak.lock()) {
            const py::gil_scoped_release release;
            alive->close();
        }
    }));
    return pool;
}

void first_touch(WorkerPool& pool, uintptr_t address, int64_t num_bytes) {
    if (address == 0) throw std::invalid_argument("address is 0 (null); it must be the address of a CPU buffer");
    if (num_bytes < 0) {
        throw std::invalid_argument("num_bytes is " + std::to_string(num_bytes) + "; it must not be negative");
    }
    pool.first_touch(reinterpret_cast<char*>(address), num_bytes);
}

Parameter make_parameter(uintptr_t gradient, const std::string& gradient_dtype, uintptr_t master,
                         uintptr_t first_moment, uintptr_t second_moment, uintptr_t weight,
                         const std::string& weight_dtype, int64_t count, double weight_decay, uintptr_t gradient2,
                         double l2_decay, double learning_rate_factor, std::optional<double> beta1,
                         std::optional<double> beta2, std::optional<double> epsilon, uint64_t random_stream) {
    Parameter parameter;
    parameter.gradient = gradient;
    parameter.gradient2 = gradient2;
    parameter.gradient_dtype = dtype_of_name("gradient_dtype", gradient_dtype);
    parameter.master = master;
    parameter.first_moment = first_moment;
    parameter.second_moment = second_moment;
    parameter.weight = weight;
    parameter.weight_dtype = dtype_of_name("weight_dtype", weight_dtype);
    parameter.count = count;
    parameter.weight_decay = weight_decay;
    parameter.l2_decay = l2_decay;
    parameter.learning_rate_factor = learning_rate_factor;
    parameter.beta1 = beta1;
    parameter.beta2 = beta2;
    parameter.epsilon = epsilon;
    parameter.random_stream = random_stream;
    return parameter;
}

bool is_stochastic(const std::string& rounding) {
    if (rounding == "nearest") return false;
    if (rounding == "stochastic") return true;
    throw std::invalid_argument("rounding is '" + rounding + "'; it must be 'nearest' or 'stochastic'");
}

std::unique_ptr<Optimizer> make_optimizer(std::shared_ptr<WorkerPool> pool, double beta1, double beta2, double epsilon,
                                          bool bias_correction, const std::string& rounding, uint64_t seed,
                                          const std::string& rollback, std::optional<int64_t> undo_budget_bytes) {
    OptimizerOptions options;
    options.beta1 = beta1;
    options.beta2 = beta2;
    options.epsilon = epsilon;
    options.bias_correction = bias_correction;
    options.stochastic_rounding = is_stochastic(rounding);
    options.seed = seed;
    options.rollback = rollback_of_name(rollback);
    options.undo_budget_bytes = undo_budget_bytes;
    return std::make_unique<Optimizer>(std::move(pool), options);
}

// The arguments of a call of `submit`.
struct SubmitCall {
    int64_t bucket = 0;
    SubmitOptions options{{0, 0.0, 1.0}, false, false, 0};
    bool has_step = false;
    bool has_learning_rate = false;

    // Python's error is set afterwards if the value has a wrong type or no argument has this name.
    void set(PyObject* name, PyObject* value) {
        const auto is = [&](const char* wanted) { return PyUnicode_CompareWithASCIIString(name, wanted) == 0; };
        if (is("step")) {
            options.step.step = PyLong_AsLongLong(value);
            has_step = true;
        } else if (is("learning_rate")) {
            options.step.learning_rate = PyFloat_AsDouble(value);
            has_learning_rate = true;
        } else if (is("gradient_scale")) {
            options.step.gradient_scale = PyFloat_AsDouble(value);
        } else if (is("speculative")) {
            options.speculative = PyObject_IsTrue(value) == 1;
        } else if (is("statistics")) {
            options.statistics = PyObject_IsTrue(value) == 1;
        } else if (is("event")) {
            options.event = PyLong_AsSize_t(value);
        } else {
            PyErr_Format(PyExc_TypeError, "submit() got an unexpected keyword argument '%U'", name);
        }
    }

    bool read(PyObject* const* values, Py_ssize_t num_positional, PyObject* names) {
        const Py_ssize_t num_names = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
        if (num_positional != 1) {
            PyErr_Format(PyExc_TypeError, "submit() takes the bucket and keyword arguments (%zd positional given)",
                         num_positional);
            return false;
        }
        bucket = PyLong_AsLongLong(values[0]);
        for (Py_ssize_t i = 0; i < num_names && PyErr_Occurred() == nullptr; ++i) {
            set(PyTuple_GET_ITEM(names, i), values[1 + i]);
        }
        if (PyErr_Occurred() != nullptr) return false;
        if (has_step && has_learning_rate) return true;
        PyErr_Format(PyExc_TypeError, "submit() misses the keyword argument '%s'", has_step ? "learning_rate" : "step");
        return false;
    }
};

// Bound by hand, and with the GIL held: pybind11's dispatch costs more than all the rest when its code is not in the
// caches, and taking the GIL back may cost any time.
PyObject* submit(PyObject* self, PyObject* const* values, Py_ssize_t num_positional, PyObject* names) {
    try {
        SubmitCall call;
        if (!call.read(values, num_positional, names)) return nullptr;
        py::cast<Optimizer&>(py::handle(self)).submit(call.bucket, call.options);
        Py_RETURN_NONE;
    } catch (const std::out_of_range& error) {
        PyErr_SetString(PyExc_IndexError, error.what());
    } catch (const std::invalid_argument& error) {
        PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
}

PyMethodDef submit_method = {
    "submit", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&submit)), METH_FASTCALL | METH_KEYWORDS,
    R"(submit($self, bucket, *, step, learning_rate, gradient_scale=1.0, speculative=False, statistics=False, event=0)
--

Queues one step of a bucket and returns at once.

step counts from 1 (bias correction); gradient_scale multiplies every gradient (1 / loss scale, times the clip
coefficient). A block of 4096 elements, counted from the start of each parameter, with a non-finite scaled gradient is
left untouched. speculative=True makes the step undoable with `rollback`; the memory for it is allocated once per bucket.
statistics=True also sums the squares of the gradients (`StepResult.sums_of_squares`). event is the handle of a CUDA event
(created with blocking synchronisation) that the step waits for, on a thread of the optimizer; 0 for none. Later steps
of this optimizer stay behind it.
Raises ValueError for step < 1, a negative or non-finite learning rate or a non-finite scale, RuntimeError if an event is
given and the CUDA driver cannot be loaded.)"};

py::tuple block_bounds(const std::vector<int64_t>& counts, int64_t number) {
    for (int64_t count : counts) check_count("counts", count);
    const BlockIndex index(counts);
    if (number < 0 || number >= index.num_blocks()) throw std::out_of_range("no such block");
    const Block block = index.at(number);
    return py::make_tuple(block.parameter, block.first, block.count, block.offset);
}

std::string describe(const Parameter& p) {
    return "Parameter(count=" + std::to_string(p.count) + ", gradient_dtype='" + name_of_dtype(p.gradient_dtype) +
           "', weight_dtype='" + name_of_dtype(p.weight_dtype) + "', weight_decay=" + text_of(p.weight_decay) + ")";
}

std::string describe(const StepResult& r) {
    return std::string("StepResult(nonfinite=") + (r.nonfinite ? "True" : "False") + ", seconds=" + text_of(r.seconds) +
           ", cpu_seconds=" + text_of(r.cpu_seconds) + ", bypassed=" + std::to_string(r.bypassed) + ")";
}

void bind_worker_pool(py::module_& module) {
    py::class_<WorkerPool, std::shared_ptr<WorkerPool>>(
        module, "WorkerPool",
        R"(C++ threads that work for optimizers, first come first served.

`WorkerPool(num_threads=0)`: 0 means as many as the cores that this process may use (scheduling mask and cgroup quota,
not environment variables). On a machine with several NUMA domains each thread stays on the cores of one and first takes
the work whose memory lies there. The threads finish what is queued when the pool is deleted or the interpreter exits. A
pool does not survive a fork. Raises ValueError for a negative number of threads.)")
        .def(py::init(&make_pool), py::arg("num_threads") = 0, py::kw_only(), py::arg("_domains") = py::none())
        .def_property_readonly("num_threads", &WorkerPool::num_threads, "Number of worker threads.")
        .def_property_readonly(
            "num_domains", [](const WorkerPool& pool) { return pool.domains().size(); },
            "Number of NUMA domains that the threads are spread over.")
        .def("first_touch", &first_touch, py::arg("address"), py::arg("num_bytes"),
             py::call_guard<py::gil_scoped_release>(),
             R"(Makes the pages of new memory exist, each in the NUMA domain whose threads will work on it.

Pages that exist stay where they are; the content is kept. Use it on each buffer of a bucket before anything else
writes there. Raises ValueError for a null address or a negative size.)")
        .def("cpu_seconds", &WorkerPool::cpu_seconds,
             "CPU time in seconds that all worker threads together have used since the pool was made.");
}

void bind_parameter(py::module_& module) {
    const auto dtype_property = [](Dtype Parameter::* member) {
        return [member](const Parameter& p) { return name_of_dtype(p.*member); };
    };
    py::class_<Parameter>(module, "Parameter",
                          R"(The buffers of one parameter: addresses, element types, number of elements.

gradient, master, first_moment, second_moment and weight are addresses of contiguous CPU buffers of `count` elements,
aligned to their element size; master and moments are fp32; gradient_dtype and weight_dtype are 'fp32', 'bf16' or
'fp16'. gradient2 is the address of a second gradient of the same type (tied weights), added to the first in fp32;
0 if there is none. weight_decay is the decoupled decay of AdamW per unit of learning rate; l2_decay times the master is added to the
gradient instead. learning_rate_factor multiplies the learning rate of a step; beta1, beta2 and epsilon take the place
of the optimizer's where they are given. random_stream distinguishes parameters for stochastic rounding.
The values are checked by `Optimizer.add_bucket`; only an unknown dtype raises ValueError here.)")
        .def(py::init(&make_parameter), py::kw_only(), py::arg("gradient"), py::arg("gradient_dtype"),
             py::arg("master"), py::arg("first_moment"), py::arg("second_moment"), py::arg("weight"),
             py::arg("weight_dtype"), py::arg("count"), py::arg("weight_decay") = 0.0, py::arg("gradient2") = 0,
             py::arg("l2_decay") = 0.0, py::arg("learning_rate_factor") = 1.0, py::arg("beta1") = py::none(),
             py::arg("beta2") = py::none(), py::arg("epsilon") = py::none(), py::arg("random_stream") = 0)
        .def_readonly("gradient", &Parameter::gradient, "Address of the gradient.")
        .def_readonly("gradient2", &Parameter::gradient2, "Address of the second gradient; 0 if there is none.")
        .def_property_readonly("gradient_dtype", dtype_property(&Parameter::gradient_dtype), "Type of the gradients.")
        .def_readonly("master", &Parameter::master, "Address of the fp32 master weight.")
        .def_readonly("first_moment", &Parameter::first_moment, "Address of the fp32 first moment.")
        .def_readonly("second_moment", &Parameter::second_moment, "Address of the fp32 second moment.")
        .def_readonly("weight", &Parameter::weight, "Address of the weight that the model reads.")
        .def_property_readonly("weight_dtype", dtype_property(&Parameter::weight_dtype), "Type of the weight.")
        .def_readonly("count", &Parameter::count, "Number of elements.")
        .def_readonly("weight_decay", &Parameter::weight_decay, "Decoupled weight decay.")
        .def_readonly("l2_decay", &Parameter::l2_decay, "L2 weight decay.")
        .def_readonly("learning_rate_factor", &Parameter::learning_rate_factor, "Factor on the learning rate.")
        .def_readonly("beta1", &Parameter::beta1, "None: the optimizer's.")
        .def_readonly("beta2", &Parameter::beta2, "None: the optimizer's.")
        .def_readonly("epsilon", &Parameter::epsilon, "None: the optimizer's.")
        .def_readonly("random_stream", &Parameter::random_stream, "Number that stochastic rounding is keyed with.")
        .def("__repr__", [](const Parameter& p) { return describe(p); });
    py::class_<StepResult>(module, "StepResult", "What `Optimizer.join` reports of one step of one bucket.")
        .def_readonly("nonfinite", &StepResult::nonfinite, "True if any gradient was NaN or infinite after scaling.")
        .def_readonly("seconds", &StepResult::seconds, "Wall-clock seconds of the work, without time in the queue.")
        .def_readonly("cpu_seconds", &StepResult::cpu_seconds, "CPU seconds of all workers together.")
        .def_readonly("bypassed", &StepResult::bypassed,
                      "Number of blocks of 4096 elements left untouched because of a non-finite gradient.")
        .def_readonly("sums_of_squares", &StepResult::sums_of_squares,
                      "With statistics=True, one fp64 sum for each parameter: of the squares of its gradients before "
                      "scaling, in the fixed order of `gradient_statistics`. Otherwise empty.")
        .def("__repr__", [](const StepResult& r) { return describe(r); });
}

}  // namespace

void bind_optimizer(py::module_& module) {
    bind_worker_pool(module);
    bind_parameter(module);
    py::class_<Optimizer> optimizer(
        module, "Optimizer",
        R"(AdamW on CPU buffers, in fp32, asynchronous, in buckets that can be stepped and undone.

A bucket is idle, submitted, or (after a speculative step was joined) stepped; a call that does not fit its state
raises RuntimeError naming bucket and state, an unknown bucket IndexError.
Buckets are processed in the order of submission, each by all workers of the pool. With g = gradient * gradient_scale
[+ l2_decay p], c1 = 1 - beta1^t and c2 = sqrt(1 - beta2^t) (both 1 without bias_correction):
m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2;
p = p (1 - learning_rate weight_decay) - learning_rate c2 / c1 * m / (sqrt(v) + c2 epsilon); weight = round(p).
rounding: 'nearest' (to even) or 'stochastic' (up with the probability of what is cut off; a function of seed, step,
the parameter's random_stream and the place in the parameter, so the same for any number of threads and any buckets).
rollback, how a speculative step can be undone: 'snapshot' keeps 12 bytes an element; 'delta' about 3: corrections to
the arithmetic inverse, for which the gradient must stay as it is until commit or rollback; 'defer' none: the step only
looks at the gradients and `commit` does the work; 'auto' takes 'delta' if undo_budget_bytes (by default half of the
available memory) suffices for all buckets when `prepare` or the first speculative step decides, else 'defer' (where a beta is
0, 'snapshot' in place of 'delta'). Every way restores and gives the same bits.
Raises ValueError unless both betas are in [0, 1) and epsilon is positive and finite, and for an unknown name.)");
    optimizer
        .def(py::init(&make_optimizer), py::arg("pool"), py::arg("beta1"), py::arg("beta2"), py::arg("epsilon"),
             py::kw_only(), py::arg("bias_correction") = true, py::arg("rounding") = "nearest", py::arg("seed") = 0,
             py::arg("rollback") = "snapshot", py::arg("undo_budget_bytes") = py::none())
        .def("add_bucket", &Optimizer::add_bucket, py::arg("parameters"),
             R"(Registers a list of `Parameter`s that are stepped together; returns the number of the bucket.

The buffers must outlive the optimizer. Raises ValueError, naming the argument and its value, for an empty list, a
null or misaligned address, a count below 1, a negative weight decay, or buffers that overlap inside the bucket.)")
        .def("prepare", &Optimizer::prepare, py::kw_only(), py::arg("speculative"),
             py::call_guard<py::gil_scoped_release>(),
             R"(Makes the pages of all buckets' buffers exist, on the pool's threads, and waits until that is done.

speculative=True decides 'auto', and allocates and touches the undo memory, too. Without it the first steps do all this,
and are slower. On a machine with several NUMA domains, pages that did not exist come to lie where they are worked on.
Contents are kept; nothing else may write to the buffers meanwhile.
Raises RuntimeError, naming bucket and state, unless all buckets are idle.)")
        .def("join", &Optimizer::join, py::arg("bucket"), py::call_guard<py::gil_scoped_release>(),
             R"(Waits, with the GIL released, until the step of a bucket is done; returns its `StepResult`.

An exception of a worker is raised here; blocks not reached are then untouched, and a speculative step can still be
rolled back.)")
        .def("rollback", &Optimizer::rollback, py::arg("bucket"), py::call_guard<py::gil_scoped_release>(),
             R"(Undoes a joined speculative step and waits until that is done.

Master and moments get their former bytes back and the weight is rounded again from the master (after stochastic
rounding it gets its former bytes back); bypassed blocks stay untouched.
Raises RuntimeError if a gradient that the undo log needs has changed; rolling back again with the right one goes on.)")
        .def("commit", &Optimizer::commit, py::arg("bucket"), py::call_guard<py::gil_scoped_release>(),
             "Accepts a joined speculative step; costs nothing, the undo memory is kept for the next one. With "
             "rollback='defer' it takes the step and waits until that is done.")
        .def("state", &Optimizer::state, py::arg("bucket"),
             "State of a bucket: 'idle', 'submitted', 'joining', 'stepped', 'rolling back' or 'committing'.")
        .def("logged_bytes", &Optimizer::logged_bytes, py::arg("bucket"),
             "Bytes of undo data that the last speculative step of a bucket needed; only while it is 'stepped'.")
        .def_property_readonly("num_buckets", &Optimizer::num_buckets, "Number of buckets.")
        .def_property_readonly("rollback_kind", &Optimizer::rollback_name,
                               "How steps are undone; 'auto' until `prepare` or the first speculative step decides.")
        .def_property_readonly("undo_bytes", &Optimizer::undo_bytes, "Bytes held for undoing steps.")
        .def_property_readonly("snapshot_bytes", &Optimizer::undo_bytes, "Another name of undo_bytes.")
        .def("_fail_at_block", &Optimizer::fail_at_block, py::arg("bucket"), py::arg("block"),
             "For tests: the next step of the bucket raises RuntimeError when a worker reaches this block.");
    auto* const type = reinterpret_cast<PyTypeObject*>(optimizer.ptr());
    optimizer.attr("submit") = py::reinterpret_steal<py::object>(PyDescr_NewMethod(type, &submit_method));
    module.def("_set_cuda_library", &EventWaiter::set_library, py::arg("path"),
               "For tests: the library that is loaded in place of the CUDA driver, before the first event.");
    module.def("_block_bounds", &block_bounds, py::arg("counts"), py::arg("number"),
               R"(For tests: (parameter, first element, number of elements, offset in the bucket) of one block.

`counts` are the numbers of elements of the parameters of a bucket. Raises IndexError for a block that does not exist.)");
}

}  // namespace spipe
