#include "adam_kernel.hpp"

namespace spipe {

const AdamKernels& adam_kernels(InstructionSet set) {
#if defined(__x86_64__)
    if (set == InstructionSet::avx512) return avx512::adam_kernels;
    if (set == InstructionSet::avx2) return avx2::adam_kernels;
#endif
    (void)set;
    return baseline::adam_kernels;
}

}  // namespace spipe
