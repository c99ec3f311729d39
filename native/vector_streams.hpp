// Loops that move memory and do no arithmetic, to measure against. Included like vector_types.hpp.

// The traffic of a step without its arithmetic: reads gradient, master and moments, writes the three and the half
// weight. `zero` is 0, which the compiler does not know; the three keep their bits. All addresses multiples of 64.
template <bool stream_state, bool stream_weight>
void same_streams(const StreamArguments& a) {
    for (int64_t i = 0; i < a.count; i += width) {
        const U g = __builtin_convertvector(load_vector<H>(a.gradient + i), U) & a.zero;
        const U p = load_vector<U>(a.master + i) ^ g;
        const U m = load_vector<U>(a.first_moment + i) ^ g;
        const U v = load_vector<U>(a.second_moment + i) ^ g;
        put<stream_state>(a.master + i, reinterpret_cast<F>(p));
        put<stream_state>(a.first_moment + i, reinterpret_cast<F>(m));
        put<stream_state>(a.second_moment + i, reinterpret_cast<F>(v));
        put<stream_weight>(a.weight + i, __builtin_convertvector(p >> 16, H));
    }
    stream_fence();
}

// STREAM triad: destination = first + factor * second.
template <bool streaming>
void triad(const StreamArguments& a) {
    const F factor = splat(a.factor);
    for (int64_t i = 0; i < a.count; i += width) {
        const F sum = load_vector<F>(a.first_moment + i) + factor * load_vector<F>(a.second_moment + i);
        put<streaming>(a.destination + i, sum);
    }
    stream_fence();
}
