// The kernels compiled for avx512: everything below the includes may use its instructions.
#include "adam_kernel.hpp"
#include "stream_kernel.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__x86_64__)
// The intrinsics of GCC 12 leave the elements that a full mask replaces uninitialised, and warn of it.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")

namespace spipe {
namespace avx512 {
namespace {

constexpr int width = 16;

#include "vector_types.hpp"

// What the compiler's vectors lack or do badly: square root, stores that bypass the caches (to a multiple of the
// vector's size), which elements of a comparison are true, conversions between widths.
SPIPE_INLINE F square_root(F x) {
    return reinterpret_cast<F>(_mm512_sqrt_ps(reinterpret_cast<__m512>(x)));
}

SPIPE_INLINE void stream(void* address, F value) {
    _mm512_stream_ps(static_cast<float*>(address), reinterpret_cast<__m512>(value));
}

SPIPE_INLINE void stream(void* address, H value) {
    _mm256_stream_si256(static_cast<__m256i*>(address), reinterpret_cast<__m256i>(value));
}

SPIPE_INLINE void stream_fence() {
    _mm_sfence();
}

SPIPE_INLINE uint32_t true_lanes(I mask) {
    return _mm512_movepi32_mask(reinterpret_cast<__m512i>(mask));
}

SPIPE_INLINE U widened(H value) {
    return reinterpret_cast<U>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(value)));
}

SPIPE_INLINE uint32_t lanes_above_255(U value) {
    return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(value), _mm512_set1_epi32(~255));
}

// The lower three bytes of each element next to each other, by 128 bits: three useful words and one that is not.
SPIPE_INLINE U pack(U value) {
    return reinterpret_cast<U>(_mm512_shuffle_epi8(
        reinterpret_cast<__m512i>(value),
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1))));
}

SPIPE_INLINE U unpack(const uint8_t* from) {
    const __m512i places = _mm512_setr_epi32(0, 1, 2, 15, 3, 4, 5, 15, 6, 7, 8, 15, 9, 10, 11, 15);
    const __m512i lanes = _mm512_permutexvar_epi32(places, _mm512_maskz_loadu_epi32(0x0fff, from));
    return reinterpret_cast<U>(_mm512_shuffle_epi8(
        lanes, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1))));
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

}  // namespace avx512
}  // namespace spipe
#endif
