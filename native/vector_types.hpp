// Vectors of `width` elements, in terms of the compiler's vector extension.
//
// Included once per instruction set, by kernels_*.cpp, inside a namespace and below the target pragma of that set; so
// it has no include guard and uses no standard library (an inline function of it, compiled here, could be picked by the
// linker for machines that lack these instructions).

using F = float __attribute__((vector_size(4 * width)));
using U = uint32_t __attribute__((vector_size(4 * width)));
using I = int32_t __attribute__((vector_size(4 * width)));
using H = uint16_t __attribute__((vector_size(2 * width)));

template <typename Vector>
SPIPE_INLINE Vector load_vector(const void* address) {
    Vector value;
    __builtin_memcpy(&value, address, sizeof(value));
    return value;
}

template <typename Vector>
SPIPE_INLINE void store_vector(void* address, Vector value) {
    __builtin_memcpy(address, &value, sizeof(value));
}

SPIPE_INLINE F splat(float value) {
    return value - F{};  // minus zero keeps every value, -0 included
}

SPIPE_INLINE U splat_bits(uint32_t value) {
    return value - U{};
}
