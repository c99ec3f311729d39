// Element types in memory and their conversions to and from fp32 vectors. Included like vector_types.hpp.
//
// The conversions are exact IEEE, round to nearest even, keep denormals, and consist of integer operations and selects
// (for fp16 denormals one magic-number addition), so every instruction set gives the same bits. A NaN keeps its sign
// and upper payload bits and becomes quiet.

SPIPE_INLINE U bits_of(F value) {
    return reinterpret_cast<U>(value);
}

SPIPE_INLINE F float_of(U bits) {
    return reinterpret_cast<F>(bits);
}

SPIPE_INLINE I ordered(U bits) {
    return reinterpret_cast<I>(bits);
}

SPIPE_INLINE U choose(I mask, U yes, U no) {
    return mask ? yes : no;
}

// `round` takes fp32 to nearest even; `round_randomly` rounds up with the probability of the cut-off fraction, for
// which it gets at least 16 uniform random low bits per element.
struct Fp32 {
    using Storage = float;
    using Vector = F;
    SPIPE_INLINE F load(const void* address) { return load_vector<F>(address); }
    SPIPE_INLINE F round(F value) { return value; }
    SPIPE_INLINE F round_randomly(F value, U) { return value; }
};

struct Bf16 {
    using Storage = uint16_t;
    using Vector = H;
    SPIPE_INLINE F load(const void* address) { return float_of(widened(load_vector<H>(address)) << 16); }
    SPIPE_INLINE H round(F value) {
        const U bits = bits_of(value);
        return finish(value, (bits + splat_bits(0x7fff) + ((bits >> 16) & 1u)) >> 16);
    }
    SPIPE_INLINE H round_randomly(F value, U random) {
        const U bits = bits_of(value);
        return finish(value, (bits + (random & 0xffffu)) >> 16);
    }

  private:
    SPIPE_INLINE H finish(F value, U rounded) {
        const U quiet_nan = (bits_of(value) >> 16) | 0x40u;
        return __builtin_convertvector(choose(value != value, quiet_nan, rounded), H);
    }
};

struct Fp16 {
    using Storage = uint16_t;
    using Vector = H;
    SPIPE_INLINE F load(const void* address) {
        const U half = widened(load_vector<H>(address));
        const U sign = (half & 0x8000u) << 16;
        const U magnitude = (half & 0x7fffu) << 13;  // exponent and mantissa at their fp32 place
        const U exponent = magnitude & 0x0f800000u;
        // Denormal: mantissa * 2^-24 = (1 + mantissa / 1024) * 2^-14 - 2^-14, exactly.
        const U denormal = bits_of(float_of(magnitude + (113u << 23)) - float_of(splat_bits(113u << 23)));
        const U finite = choose(ordered(exponent) == 0, denormal, magnitude + (112u << 23));
        return float_of(sign | choose(ordered(exponent) == 0x0f800000, magnitude + (224u << 23), finite));
    }
    SPIPE_INLINE H round(F value) {
        const U bits = bits_of(value);
        const U magnitude = bits & 0x7fffffffu;
        const U normal = (magnitude - (112u << 23) + splat_bits(0xfff) + ((magnitude >> 13) & 1u)) >> 13;
        // Denormal result: adding 0.5 makes the unit in the last place 2^-24, so the hardware rounds for us.
        const U denormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(splat(0.5f));
        return finish(bits, choose(ordered(magnitude) < (113 << 23), denormal, normal));
    }
    SPIPE_INLINE H round_randomly(F value, U random) {
        const U bits = bits_of(value);
        const U magnitude = bits & 0x7fffffffu;
        const U noise = random & 0x1fffu;
        const U normal = (magnitude - (112u << 23) + noise) >> 13;
        // Denormal result: in units of 2^-24, the fraction plus uniform noise of 13 bits, cut off.
        const F units = float_of(choose(ordered(magnitude) < (113 << 23), magnitude, U{})) * 16777216.0f;
        const F lifted = units + __builtin_convertvector(ordered(noise), F) * 0x1p-13f;
        const U denormal = reinterpret_cast<U>(__builtin_convertvector(lifted, I));
        return finish(bits, choose(ordered(magnitude) < (113 << 23), denormal, normal));
    }

  private:
    SPIPE_INLINE H finish(U bits, U finite) {
        const U sign = (bits >> 16) & 0x8000u;
        const U magnitude = bits & 0x7fffffffu;
        // 65536 and above; 65520.. carry by rounding.
        const U bounded = choose(ordered(magnitude) >= 0x47800000, splat_bits(0x7c00), finite);
        const U quiet_nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
        return __builtin_convertvector(sign | choose(ordered(magnitude) > 0x7f800000, quiet_nan, bounded), H);
    }
};

// Stores past the caches if `streaming`, otherwise through them.
template <bool streaming, typename Vector>
SPIPE_INLINE void put(void* address, Vector value) {
    if (streaming) {
        stream(address, value);
    } else {
        store_vector(address, value);
    }
}
