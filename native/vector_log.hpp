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

// Of four vectors, three of every four words are useful; in a row they fill three vectors. Word w of output k is this
// word of vectors k and k + 1.
struct UsefulWords {
    alignas(64) uint32_t of[3][width];
};

constexpr UsefulWords find_useful_words() {
    constexpr int useful = width / 4 * 3;
    UsefulWords words{};
    for (int place = 0; place < 3 * width; ++place) {
        const int vector = place / useful - place / width;
        words.of[place / width][place % width] =
            static_cast<uint32_t>(vector * width + place % useful / 3 * 4 + place % useful % 3);
    }
    return words;
}

constexpr UsefulWords useful_words = find_useful_words();

// Takes the corrections of a block from the first element to the last, and writes them out in groups of whole cache
// lines.
struct LogWriter {
    static constexpr int group_elements = 64;
    static constexpr int group_vectors = group_elements / width;

    uint8_t* destination;
    bool streaming;
    U waiting[group_vectors];  // of the group that is not complete

    SPIPE_INLINE void flush(LogWriter& w, int64_t group) {
        uint8_t* to = w.destination + group * (3 * group_elements);
        for (int first = 0; first < group_vectors; first += 4) {
            for (int output = 0; output < 3; ++output, to += 4 * width) {
                const U* const from = w.waiting + first + output;
                const U packed = __builtin_shuffle(from[0], from[1], load_vector<U>(useful_words.of[output]));
                if (w.streaming) {
                    stream(to, reinterpret_cast<F>(packed));
                } else {
                    store_vector(to, packed);
                }
            }
        }
    }

    SPIPE_INLINE void put(LogWriter& w, int64_t i, U master, U first, U second) {
        const int64_t place = i % group_elements / width;
        w.waiting[place] = pack(master | first << 8 | second << 16);
        if (place == group_vectors - 1) flush(w, i / group_elements);
    }

    SPIPE_INLINE void finish(LogWriter& w, int64_t count) {
        if (count % group_elements != 0) flush(w, count / group_elements);
    }
};

// Logs the elements from place i on that escape: bits of `lanes_of`, for each state.
__attribute__((noinline)) void log_escapes(const uint32_t* lanes_of, const F* old, int64_t i, UndoLog& log) {
    for (uint32_t state = 0; state < 3; ++state) {
        const uint32_t where = (log.block_in_chunk << 2 | state) << Escape::index_bits | static_cast<uint32_t>(i);
        for (uint32_t lanes = lanes_of[state]; lanes != 0; lanes &= lanes - 1) {
            const int lane = __builtin_ctz(lanes);
            uint32_t bits;
            __builtin_memcpy(&bits, reinterpret_cast<const float*>(old + state) + lane, sizeof(bits));
            log.escapes[log.num_escapes++] = {where + static_cast<uint32_t>(lane), bits};
        }
    }
}

SPIPE_INLINE void log_vector(const Constants& c, const State& old, const Step& step, int64_t count, int64_t i,
                             LogWriter& writer, UndoLog& log) {
    const State& now = step.now;
    U missed[3] = {correction(old.master, guess_master(c, now.master, step.subtracted)),
                   correction(old.first_moment, guess_first(c, now.first_moment, step.gradient)),
                   correction(old.second_moment, guess_second(c, now.second_moment, step.gradient))};
    if (__builtin_expect(lanes_above_255(missed[0] | missed[1] | missed[2]) != 0, 0)) {
        const F values[3] = {old.master, old.first_moment, old.second_moment};
        const uint32_t valid = count - i < width ? (1u << (count - i)) - 1 : ~0u;
        uint32_t lanes_of[3];
        for (int state = 0; state < 3; ++state) {
            lanes_of[state] = lanes_above_255(missed[state]) & valid;
            missed[state] &= 255u;
        }
        log_escapes(lanes_of, values, i, log);
    }
    LogWriter::put(writer, i, missed[0], missed[1], missed[2]);
}
