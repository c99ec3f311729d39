// Undoing a logged step. Included like vector_types.hpp.

SPIPE_INLINE void apply_escapes(float* values, uint32_t state, const UndoLog& log) {
    constexpr uint32_t index_mask = (1u << Escape::index_bits) - 1;
    for (int64_t k = 0; k < log.num_escapes; ++k) {
        const Escape& escape = log.escapes[k];
        if ((escape.where >> Escape::index_bits & 3u) != state) continue;
        __builtin_memcpy(values + (escape.where & index_mask), &escape.bits, sizeof(escape.bits));
    }
}

SPIPE_INLINE void undo_master(const Constants& c, const BlockPointers& b, int64_t i, const uint8_t* corrections) {
    const State now = load_state(b, i);
    const F guess = guess_master(c, now.master, update(c, now.first_moment, now.second_moment));
    store_vector(b.master + i, corrected(guess, unpack(corrections + 3 * i) & 255u));
}

template <typename Gradient>
SPIPE_INLINE void undo_moments(const Constants& c, const BlockPointers& b, int64_t i, const uint8_t* corrections) {
    const F gradient = load_gradient<Gradient>(b, i) * c.gradient_scale;
    const State now = load_state(b, i);  // its master is the old one again
    const F g = with_l2(c, gradient, now.master);
    const U packed = unpack(corrections + 3 * i);
    store_vector(b.first_moment + i, corrected(guess_first(c, now.first_moment, g), packed >> 8 & 255u));
    store_vector(b.second_moment + i, corrected(guess_second(c, now.second_moment, g), packed >> 16));
}

template <typename Gradient>
void undo(const AdamScalars& scalars, const BlockPointers& b, const UndoLog& log) {
    const Constants c = constants(scalars);
    const int64_t whole = b.count / width * width;
    for (int64_t i = 0; i < whole; i += width) undo_master(c, b, i, log.corrections);
    BlockTail<Gradient, Fp32> tail;
    if (whole < b.count) {
        undo_master(c, tail.fill(b, whole), whole, log.corrections);
        tail.drain(b, whole);
    }
    apply_escapes(b.master, 0, log);  // before the moments: with L2 decay they depend on it
    for (int64_t i = 0; i < whole; i += width) undo_moments<Gradient>(c, b, i, log.corrections);
    if (whole < b.count) {
        undo_moments<Gradient>(c, tail.fill(b, whole), whole, log.corrections);
        tail.drain(b, whole);
    }
    apply_escapes(b.first_moment, 1, log);
    apply_escapes(b.second_moment, 2, log);
}
