// The undo log: what the arithmetic inverse of a step misses. Included like vector_types.hpp.
//
// A guess at the old state is computed from the new one, somewhat too small in magnitude; the log holds old minus guess
// as integers (units in the last place, where the signs agree), or the old value itself where that does not fit into a
// byte. Logging and undoing compute the same guess from the same bits, so undoing is exact whatever the quality of the
// guess.

SPIPE_INLINE F guess_master(const Constants& c, F master, F subtracted) {
    return (master + subtracted) * c.inverse_decay;
}

SPIPE_INLINE F guess_first(const Constants& c, F first_moment, F g) {
    return (first_moment - c.one_minus_beta1 * g) * c.inverse_beta1;
}

SPIPE_INLINE F guess_second(const Constants& c, F second_moment, F g) {
    return (second_moment - c.one_minus_beta2 * (g * g)) * c.inverse_beta2;
}

SPIPE_INLINE U correction(F old, F guess) {
    return bits_of(old) - bits_of(guess);
}

SPIPE_INLINE F corrected(F guess, U correction) {
    return float_of(bits_of(guess) + correction);
}

// Takes the packed corrections of a block from the first element to the last, and writes them out in groups of whole
// cache lines. A group goes out when the one after it is complete: its stores have then left the store buffer.
struct LogWriter {
    static constexpr int group_elements = 64;
    static constexpr int group_bytes = 3 * group_elements;

    uint8_t* destination;
    bool streaming;
    alignas(64) uint8_t groups[2][group_bytes + 64];  // packing writes up to a vector beyond the end

    SPIPE_INLINE void flush(LogWriter& w, int64_t group) {
        for (int k = 0; k < group_bytes; k += 4 * width) {
            const F bytes = load_vector<F>(w.groups[group & 1] + k);
            uint8_t* const to = w.destination + group * group_bytes + k;
            if (w.streaming) {
                stream(to, bytes);
            } else {
                store_vector(to, bytes);
            }
        }
    }

    SPIPE_INLINE void put(LogWriter& w, int64_t i, U master, U first, U second) {
        const int64_t group = i / group_elements;
        const int64_t place = i % group_elements;
        pack(w.groups[group & 1] + 3 * place, master | first << 8 | second << 16);
        if (place == group_elements - width && group > 0) flush(w, group - 1);
    }

    SPIPE_INLINE void finish(LogWriter& w, int64_t count) {
        const int64_t complete = count / group_elements;
        if (complete > 0) flush(w, complete - 1);
        if (count % group_elements != 0) flush(w, complete);
    }
};

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
                             LogWriter& writer, UndoLog& log) {
    const State& now = step.now;
    U missed[3] = {correction(old.master, guess_master(c, now.master, step.subtracted)),
                   correction(old.first_moment, guess_first(c, now.first_moment, step.gradient)),
                   correction(old.second_moment, guess_second(c, now.second_moment, step.gradient))};
    if (__builtin_expect(any_above_255(missed[0] | missed[1] | missed[2]), 0)) {
        const F values[3] = {old.master, old.first_moment, old.second_moment};
        for (uint32_t state = 0; state < 3; ++state) {
            uint32_t integers[width];
            float olds[width];
            store_vector(integers, missed[state]);
            store_vector(olds, values[state]);
            log_escapes(integers, olds, state, i, count, log);
            missed[state] &= 255u;
        }
    }
    LogWriter::put(writer, i, missed[0], missed[1], missed[2]);
}
