// The kernels compiled for baseline: everything below the includes may use its instructions.
#include "adam_kernel.hpp"
#include "stream_kernel.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace spipe {
namespace baseline {
namespace {

constexpr int width = 4;

#include "vector_types.hpp"

// What the compiler's vectors lack or do badly: square root, stores that bypass the caches (to a multiple of the
// vector's size), which elements of a comparison are true, conversions between widths.
#if defined(__x86_64__)
SPIPE_INLINE F square_root(F x) {
    return reinterpret_cast<F>(_mm_sqrt_ps(reinterpret_cast<__m128>(x)));
}

SPIPE_INLINE void stream(void* address, F value) {
    _mm_stream_ps(static_cast<float*>(address), reinterpret_cast<__m128>(value));
}

SPIPE_INLINE void stream(void* address, H value) {
    _mm_stream_si64(static_cast<long long*>(address), reinterpret_cast<long long>(value));
}

SPIPE_INLINE void stream_fence() {
    _mm_sfence();
}

SPIPE_INLINE uint32_t true_lanes(I mask) {
    return static_cast<uint32_t>(_mm_movemask_ps(reinterpret_cast<__m128>(mask)));
}
#else
SPIPE_INLINE F square_root(F x) {
    for (int lane = 0; lane < width; ++lane) x[lane] = __builtin_sqrtf(x[lane]);
    return x;
}

template <typename Vector>
SPIPE_INLINE void stream(void* address, Vector value) {
    store_vector(address, value);
}

SPIPE_INLINE void stream_fence() {}

SPIPE_INLINE uint32_t true_lanes(I mask) {
    uint32_t bits = 0;
    for (int lane = 0; lane < width; ++lane) bits |= mask[lane] != 0 ? 1u << lane : 0u;
    return bits;
}
#endif

SPIPE_INLINE U widened(H value) {
    return __builtin_convertvector(value, U);
}

SPIPE_INLINE uint32_t lanes_above_255(U value) {
    return true_lanes(reinterpret_cast<I>(value >> 8) != 0);
}

// The lower three bytes of each element next to each other: three useful words and one that is not.
SPIPE_INLINE U pack(U value) {
    return U{value[0] | value[1] << 24, value[1] >> 8 | value[2] << 16, value[2] >> 16 | value[3] << 8, 0};
}

SPIPE_INLINE U unpack(const uint8_t* from) {
    U value = {};
    for (int lane = 0; lane < width; ++lane) {
        const uint8_t* const bytes = from + 3 * lane;
        value[lane] = bytes[0] | static_cast<uint32_t>(bytes[1]) << 8 | static_cast<uint32_t>(bytes[2]) << 16;
    }
    return value;
}

// clang-format off: each uses the ones before
#include "vector_dtype.hpp"
#include "vector_arithmetic.hpp"
#include "vector_log.hpp"
#include "vector_step.hpp"
#include "vector_undo.hpp"
#include "vector_inspect.hpp"
#include "vector_streams.hpp"
// clang-format on

}  // namespace

#include "vector_tables.hpp"

}  // namespace baseline
}  // namespace spipe
