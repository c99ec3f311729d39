// The arithmetic of one AdamW step on vectors. Included like vector_types.hpp. Plain twin: runtime/adam_reference.py.

struct Constants {
    F gradient_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, epsilon, decay, l2_decay;
    F inverse_beta1, inverse_beta2, inverse_decay;
    bool with_l2;
};

SPIPE_INLINE Constants constants(const AdamScalars& s) {
    return {splat(s.gradient_scale),  splat(s.beta1),         splat(s.one_minus_beta1), splat(s.beta2),
            splat(s.one_minus_beta2), splat(s.step_size),     splat(s.epsilon),         splat(s.decay),
            splat(s.l2_decay),        splat(s.inverse_beta1), splat(s.inverse_beta2),   splat(s.inverse_decay),
            s.l2_decay != 0};
}

struct State {
    F master, first_moment, second_moment;
};

SPIPE_INLINE State load_state(const BlockPointers& b, int64_t i) {
    return {load_vector<F>(b.master + i), load_vector<F>(b.first_moment + i), load_vector<F>(b.second_moment + i)};
}

template <typename Gradient>
SPIPE_INLINE F load_gradient(const BlockPointers& b, int64_t i) {
    using Storage = typename Gradient::Storage;
    const F gradient = Gradient::load(static_cast<const Storage*>(b.gradient) + i);
    if (b.gradient2 == nullptr) return gradient;
    return gradient + Gradient::load(static_cast<const Storage*>(b.gradient2) + i);
}

// What is subtracted from the decayed master; a function of the new moments alone.
SPIPE_INLINE F update(const Constants& c, F first_moment, F second_moment) {
    return c.step_size * (first_moment / (square_root(second_moment) + c.epsilon));
}

SPIPE_INLINE F with_l2(const Constants& c, F gradient, F master) {
    return c.with_l2 ? gradient + c.l2_decay * master : gradient;
}

struct Step {
    State now;
    F gradient;    // scaled, with L2 decay
    F subtracted;  // from the decayed master
};

SPIPE_INLINE Step stepped(const Constants& c, F gradient, const State& old) {
    const F g = with_l2(c, gradient, old.master);
    const F m = c.beta1 * old.first_moment + c.one_minus_beta1 * g;
    const F v = c.beta2 * old.second_moment + c.one_minus_beta2 * (g * g);
    const F subtracted = update(c, m, v);
    return {{old.master * c.decay - subtracted, m, v}, g, subtracted};
}
