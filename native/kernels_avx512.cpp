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
// vector's size), whether any element of a comparison is true, conversions between widths.
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

SPIPE_INLINE bool any(I mask) {
    return _mm512_movepi32_mask(reinterpret_cast<__m512i>(mask)) != 0;
}

// Elements that do not fit into a byte become anything.
SPIPE_INLINE C narrowed(U value) {
    return reinterpret_cast<C>(_mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(value)));
}

SPIPE_INLINE U widened(H value) {
    return reinterpret_cast<U>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(value)));
}

SPIPE_INLINE U widened(C value) {
    return reinterpret_cast<U>(_mm512_cvtepu8_epi32(reinterpret_cast<__m128i>(value)));
}

SPIPE_INLINE bool any_above_255(U value) {
    return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(value), _mm512_set1_epi32(~255)) != 0;
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
