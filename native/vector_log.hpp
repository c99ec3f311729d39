// The undo log: what the arithmetic inverse of a step misses. Included like vector_types.hpp.
//
// A guess at the old state is computed from the new one; the log holds old minus guess as integers (units in the last
// place, where the signs agree), or the old value itself where that does not fit into a byte. Logging and undoing
// compute the same guess from the same bits, so undoing is exact whatever the quality of the guess.

SPIPE_INLINE F guess_master(const Constants& c, F master, F subtracted) {
    return (master + subtracted) * c.inverse_decay;
}

SPIPE_INLINE F guess_first(const Constants& c, F first_moment, F g) {
    return (first_moment - c.one_minus_beta1 * g) * c.inverse_beta1;
}

SPIPE_INLINE F guess_second(const Constants& c, F second_moment, F g) {
    return (second_moment - c.one_minus_beta2 * (g * g)) * c.inverse_beta2;
}

// Old minus guess, plus 128: a correction that fits into a byte is one of 0..255.
SPIPE_INLINE U correction(F old, F guess) {
    return bits_of(old) - bits_of(guess) + splat_bits(128);
}

SPIPE_INLINE F corrected(F guess, const uint8_t* corrections) {
    return float_of(bits_of(guess) + widened(load_vector<C>(corrections)) - splat_bits(128));
}

// Elements of one state from place i on that escape; `last` is the number of elements of the block.
__attribute__((noinline)) void log_escapes(const uint32_t* corrections, const float* old, uint32_t state, int64_t i,
                                           int64_t last, UndoLog& log) {
    const uint32_t where = (log.block_in_chunk << 2 | state) << Escape::index_bits;
    for (int lane = 0; lane < width && i + lane < last; ++lane) {
        if (corrections[lane] < 256) continue;
        uint32_t bits;
        __builtin_memcpy(&bits, old + lane, sizeof(bits));
        log.escapes[log.num_escapes++] = {where | static_cast<uint32_t>(i + lane), bits};
    }
}

SPIPE_INLINE void log_vector(const Constants& c, const State& old, const Step& step, int64_t count, int64_t i,
                             uint8_t* corrections, UndoLog& log) {
    const State& now = step.now;
    const U missed[3] = {correction(old.master, guess_master(c, now.master, step.subtracted)),
                         correction(old.first_moment, guess_first(c, now.first_moment, step.gradient)),
                         correction(old.second_moment, guess_second(c, now.second_moment, step.gradient))};
    const int64_t stride = padded(count);
    store_vector(corrections + i, narrowed(missed[0]));
    store_vector(corrections + i + stride, narrowed(missed[1]));
    store_vector(corrections + i + 2 * stride, narrowed(missed[2]));
    if (__builtin_expect(any_above_255(missed[0] | missed[1] | missed[2]), 0)) {
        const F values[3] = {old.master, old.first_moment, old.second_moment};
        for (uint32_t state = 0; state < 3; ++state) {
            if (!any_above_255(missed[state])) continue;
            uint32_t integers[width];
            float olds[width];
            store_vector(integers, missed[state]);
            store_vector(olds, values[state]);
            log_escapes(integers, olds, state, i, count, log);
        }
    }
}
