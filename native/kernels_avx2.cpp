// The kernels compiled for avx2: everything below the includes may use its instructions.
#include "adam_kernel.hpp"
#include "stream_kernel.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__x86_64__)
#pragma GCC target("avx2,f16c")

namespace spipe {
namespace avx2 {
namespace {

constexpr int width = 8;

#include "vector_types.hpp"

// What the compiler's vectors lack or do badly: square root, stores that bypass the caches (to a multiple of the
// vector's size), which elements of a comparison are true, conversions between widths.
SPIPE_INLINE F square_root(F x) {
    return reinterpret_cast<F>(_mm256_sqrt_ps(reinterpret_cast<__m256>(x)));
}

SPIPE_INLINE void stream(void* address, F value) {
    _mm256_stream_ps(static_cast<float*>(address), reinterpret_cast<__m256>(value));
}

SPIPE_INLINE void stream(void* address, H value) {
    _mm_stream_si128(static_cast<__m128i*>(address), reinterpret_cast<__m128i>(value));
}

SPIPE_INLINE void stream_fence() {
    _mm_sfence();
}

SPIPE_INLINE uint32_t true_lanes(I mask) {
    return static_cast<uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(mask)));
}

SPIPE_INLINE U widened(H value) {
    return reinterpret_cast<U>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(value)));
}

SPIPE_INLINE uint32_t lanes_above_255(U value) {
    return true_lanes(reinterpret_cast<I>(value >> 8) != 0);
}

// The lower three bytes of each element next to each other, by 128 bits: three useful words and one that is not.
SPIPE_INLINE U pack(U value) {
    return reinterpret_cast<U>(_mm256_shuffle_epi8(
        reinterpret_cast<__m256i>(value),
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1))));
}

SPIPE_INLINE U unpack(const uint8_t* from) {
    const __m256i valid = _mm256_setr_epi32(-1, -1, -1, -1, -1, -1, 0, 0);
    const __m256i places = _mm256_setr_epi32(0, 1, 2, 7, 3, 4, 5, 7);
    const __m256i bytes = _mm256_maskload_epi32(reinterpret_cast<const int*>(from), valid);
    return reinterpret_cast<U>(_mm256_shuffle_epi8(
        _mm256_permutevar8x32_epi32(bytes, places),
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1))));
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

}  // namespace avx2
}  // namespace spipe
#endif
