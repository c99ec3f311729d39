// Looks at the gradient of a block before anything is written. Included like vector_types.hpp.
//
// The sum of squares has sum_lanes partial sums in fp64: element i goes to lane i mod sum_lanes, lanes are added in
// halves. The same order on every instruction set; the products are exact, as fp32 has 24 bits and fp64 has 53.

constexpr int sum_lanes = 16;

using HalfF = float __attribute__((vector_size(2 * width)));
using D = double __attribute__((vector_size(4 * width)));  // width / 2 elements

SPIPE_INLINE void add_squares(F values, D* lanes) {
    HalfF halves[2];
    __builtin_memcpy(halves, &values, sizeof(values));
    for (int k = 0; k < 2; ++k) {
        const D wide = __builtin_convertvector(halves[k], D);
        lanes[k] += wide * wide;
    }
}

SPIPE_INLINE double sum_of_lanes(const D* lanes) {
    double sums[sum_lanes];
    __builtin_memcpy(sums, lanes, sizeof(sums));
    for (int half = sum_lanes / 2; half > 0; half /= 2) {
        for (int lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
    }
    return sums[0];
}

template <typename Gradient, bool with_sum, bool with_checksum>
SPIPE_INLINE void inspect_vector(const BlockPointers& b, int64_t i, F scale, I& largest, U& checksum, D* lanes) {
    const F gradient = load_gradient<Gradient>(b, i);
    const U bits = bits_of(gradient * scale);
    const I magnitude = ordered(bits & 0x7fffffffu);
    largest = magnitude > largest ? magnitude : largest;
    if (with_checksum) checksum += bits;
    if (with_sum) add_squares(gradient, lanes);
}

template <typename Gradient, bool with_sum, bool with_checksum>
SPIPE_INLINE Inspection inspect_block(const BlockPointers& block, float gradient_scale) {
    const BlockPointers b = block;
    constexpr int vectors = sum_lanes / width;
    const F scale = splat(gradient_scale);
    I largest = {};
    U checksum = {};
    D lanes[2 * vectors] = {};
    int64_t i = 0;
    for (; i + sum_lanes <= b.count; i += sum_lanes) {
        for (int k = 0; k < vectors; ++k) {
            inspect_vector<Gradient, with_sum, with_checksum>(b, i + k * width, scale, largest, checksum,
                                                              lanes + 2 * k);
        }
    }
    for (int k = 0; i < b.count; ++k, i += width) {
        Tail<typename Gradient::Storage> gradient, gradient2;
        const int64_t last = b.count < i + width ? b.count : i + width;
        gradient.fill(b.gradient, i, last);
        if (b.gradient2 != nullptr) gradient2.fill(b.gradient2, i, last);
        const BlockPointers tail = {gradient.elements,
                                    b.gradient2 == nullptr ? nullptr : gradient2.elements,
                                    nullptr,
                                    nullptr,
                                    nullptr,
                                    nullptr,
                                    0};
        inspect_vector<Gradient, with_sum, with_checksum>(tail, 0, scale, largest, checksum, lanes + 2 * k);
    }
    uint32_t sum = 0;
    for (int lane = 0; lane < width; ++lane) sum += checksum[lane];
    return {true_lanes(largest >= 0x7f800000) != 0, sum, with_sum ? sum_of_lanes(lanes) : 0.0};
}

template <typename Gradient>
Inspection inspect(const BlockPointers& block, float gradient_scale, bool with_sum, bool with_checksum) {
    if (with_sum && with_checksum) return inspect_block<Gradient, true, true>(block, gradient_scale);
    if (with_sum) return inspect_block<Gradient, true, false>(block, gradient_scale);
    if (with_checksum) return inspect_block<Gradient, false, true>(block, gradient_scale);
    return inspect_block<Gradient, false, false>(block, gradient_scale);
}
