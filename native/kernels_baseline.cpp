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
// vector's size), whether any element of a comparison is true, conversions between widths.
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

SPIPE_INLINE bool any(I mask) {
    return _mm_movemask_ps(reinterpret_cast<__m128>(mask)) != 0;
}

// Elements that do not fit into a byte become anything.
SPIPE_INLINE C narrowed(U value) {
    const __m128i words = _mm_packs_epi32(reinterpret_cast<__m128i>(value), _mm_setzero_si128());
    const __m128i bytes = _mm_packus_epi16(words, words);
    return load_vector<C>(&bytes);
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

SPIPE_INLINE bool any(I mask) {
    int32_t bits = 0;
    for (int lane = 0; lane < width; ++lane) bits |= mask[lane];
    return bits != 0;
}

SPIPE_INLINE C narrowed(U value) {
    return __builtin_convertvector(value, C);
}
#endif

SPIPE_INLINE U widened(H value) {
    return __builtin_convertvector(value, U);
}

SPIPE_INLINE U widened(C value) {
    return __builtin_convertvector(value, U);
}

SPIPE_INLINE bool any_above_255(U value) {
    return any(reinterpret_cast<I>(value >> 8) != 0);
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
