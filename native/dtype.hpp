// Element types of the buffers and their conversions to and from fp32.
//
// The conversions are exact IEEE round-to-nearest-even, keep denormals, and consist of integer operations and selects
// (one magic-number addition for denormal halves), so that the compiler vectorises them on every instruction set.
// A NaN keeps its sign and upper payload bits and becomes quiet.
#pragma once

#include <cstdint>
#include <cstring>

#define SPIPE_INLINE static inline __attribute__((always_inline))

namespace spipe {

enum class Dtype { fp32 = 0, bf16 = 1, fp16 = 2 };

constexpr int64_t bytes_per_element(Dtype dtype) {
    return dtype == Dtype::fp32 ? 4 : 2;
}

SPIPE_INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}

SPIPE_INLINE float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

// Storage types: `Storage` is the bit pattern in memory.
struct Fp32 {
    using Storage = float;
    SPIPE_INLINE float load(float value) { return value; }
    SPIPE_INLINE float round(float value) { return value; }
};

struct Bf16 {
    using Storage = uint16_t;
    SPIPE_INLINE float load(uint16_t half) { return float_of(uint32_t{half} << 16); }
    SPIPE_INLINE uint16_t round(float value) {
        const uint32_t bits = bits_of(value);
        const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        const uint32_t quiet_nan = (bits >> 16) | 0x40u;
        const bool is_nan = static_cast<int32_t>(bits & 0x7fffffffu) > 0x7f800000;
        return static_cast<uint16_t>(is_nan ? quiet_nan : rounded);
    }
};

struct Fp16 {
    using Storage = uint16_t;
    SPIPE_INLINE float load(uint16_t half) {
        const uint32_t sign = (uint32_t{half} & 0x8000u) << 16;
        const uint32_t magnitude = (uint32_t{half} & 0x7fffu) << 13;  // exponent and mantissa at their fp32 place
        const int32_t exponent = static_cast<int32_t>(magnitude & 0x0f800000u);
        const uint32_t normal = magnitude + (112u << 23);
        const uint32_t special = magnitude + (224u << 23);
        // Denormal: mantissa * 2^-24 = (1 + mantissa / 1024) * 2^-14 - 2^-14, exactly.
        const uint32_t denormal = bits_of(float_of(magnitude + (113u << 23)) - float_of(113u << 23));
        const uint32_t finite = exponent == 0 ? denormal : normal;
        return float_of(sign | (exponent == 0x0f800000 ? special : finite));
    }
    SPIPE_INLINE uint16_t round(float value) {
        const uint32_t bits = bits_of(value);
        const uint32_t sign = (bits >> 16) & 0x8000u;
        const uint32_t magnitude = bits & 0x7fffffffu;
        const int32_t ordered = static_cast<int32_t>(magnitude);
        const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
        // Denormal result: adding 0.5 makes the unit in the last place 2^-24, so the hardware rounds for us.
        const uint32_t denormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
        const uint32_t quiet_nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
        const uint32_t finite = ordered < (113 << 23) ? denormal : normal;
        const uint32_t bounded =
            ordered >= 0x47800000 ? 0x7c00u : finite;  // 65536 and above; 65520.. carry by rounding
        return static_cast<uint16_t>(sign | (ordered > 0x7f800000 ? quiet_nan : bounded));
    }
};

}  // namespace spipe
