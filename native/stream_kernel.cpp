#include "stream_kernel.hpp"

#include <algorithm>
#include <stdexcept>

#include "parameter.hpp"

namespace spipe {
namespace {

constexpr int64_t chunk_elements = 65536;

class StreamJob final : public Job {
  public:
    StreamJob(StreamKernel kernel, const StreamArguments& whole)
        : Job((whole.count + chunk_elements - 1) / chunk_elements), kernel_(kernel), whole_(whole) {}

  protected:
    void run(int64_t chunk) override {
        const int64_t first = chunk * chunk_elements;
        StreamArguments part = whole_;
        part.gradient += first;
        part.master += first;
        part.first_moment += first;
        part.second_moment += first;
        part.weight += first;
        part.destination += first;
        part.count = std::min(chunk_elements, whole_.count - first);
        kernel_(part);
    }

  private:
    const StreamKernel kernel_;
    const StreamArguments whole_;
};

StreamKernel kernel_named(const std::string& name) {
    const StreamKernels& kernels = stream_kernels(instruction_set());
    if (name == "streams") return kernels.same_streams[0];
    if (name == "streams_weight_nt") return kernels.same_streams[1];
    if (name == "streams_nt") return kernels.same_streams[2];
    if (name == "triad") return kernels.triad[0];
    if (name == "triad_nt") return kernels.triad[1];
    throw std::invalid_argument("name is '" + name + "'; it must be 'streams', 'streams_weight_nt', 'streams_nt', " +
                                "'triad' or 'triad_nt'");
}

}  // namespace

double run_streams(WorkerPool& pool, const std::string& name, const StreamArguments& arguments) {
    const StreamKernel kernel = kernel_named(name);
    check_count("count", arguments.count);
    if (arguments.count % 64 != 0) {
        throw std::invalid_argument("count is " + std::to_string(arguments.count) + "; it must be a multiple of 64");
    }
    const void* const buffers[] = {arguments.gradient,      arguments.master, arguments.first_moment,
                                   arguments.second_moment, arguments.weight, arguments.destination};
    for (const void* buffer : buffers) {
        if (buffer == nullptr || reinterpret_cast<uintptr_t>(buffer) % 64 != 0) {
            throw std::invalid_argument("a buffer is at " + std::to_string(reinterpret_cast<uintptr_t>(buffer)) +
                                        "; all must be given, at multiples of 64");
        }
    }
    auto job = std::make_shared<StreamJob>(kernel, arguments);
    pool.submit(job);
    pool.wait(*job);
    return job->seconds();
}

const StreamKernels& stream_kernels(InstructionSet set) {
#if defined(__x86_64__)
    if (set == InstructionSet::avx512) return avx512::stream_kernels;
    if (set == InstructionSet::avx2) return avx2::stream_kernels;
#endif
    (void)set;
    return baseline::stream_kernels;
}

}  // namespace spipe
