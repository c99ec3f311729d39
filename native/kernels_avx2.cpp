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
// vector's size), whether any element of a comparison is true, conversions between widths.
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

SPIPE_INLINE bool any(I mask) {
    return _mm256_movemask_ps(reinterpret_cast<__m256>(mask)) != 0;
}

// Elements that do not fit into a byte become anything.
SPIPE_INLINE C narrowed(U value) {
    const __m256i whole = reinterpret_cast<__m256i>(value);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    const __m128i bytes = _mm_packus_epi16(words, words);
    return load_vector<C>(&bytes);
}

SPIPE_INLINE U widened(H value) {
    return reinterpret_cast<U>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(value)));
}

SPIPE_INLINE U widened(C value) {
    return reinterpret_cast<U>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(&value))));
}

SPIPE_INLINE bool any_above_255(U value) {
    return !_mm256_testz_si256(reinterpret_cast<__m256i>(value), _mm256_set1_epi32(~255));
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
