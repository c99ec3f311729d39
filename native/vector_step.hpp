// One step of a block: arithmetic, stores, reading ahead. Included like vector_types.hpp.

// 32 random bits for each element: a hash of the key and the place in the block.
SPIPE_INLINE U random_bits(uint64_t key, int64_t i) {
    U x;
    for (int lane = 0; lane < width; ++lane) x[lane] = static_cast<uint32_t>(lane);
    x += static_cast<uint32_t>(i) + static_cast<uint32_t>(key);
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= (x >> 15) ^ static_cast<uint32_t>(key >> 32);
    x *= 0x846ca68bu;
    return x ^ (x >> 16);
}

template <typename Weight>
SPIPE_INLINE void put_weight(const BlockPointers& b, int64_t i, F master, const StepMode& mode) {
    void* const address = static_cast<typename Weight::Storage*>(b.weight) + i;
    const auto rounded =
        mode.stochastic ? Weight::round_randomly(master, random_bits(mode.random_key, i)) : Weight::round(master);
    if (mode.stream_weight) {
        stream(address, rounded);
    } else {
        store_vector(address, rounded);
    }
}

SPIPE_INLINE void put_state(const BlockPointers& b, int64_t i, const State& state, bool streaming) {
    if (streaming) {
        stream(b.master + i, state.master);
        stream(b.first_moment + i, state.first_moment);
        stream(b.second_moment + i, state.second_moment);
    } else {
        store_vector(b.master + i, state.master);
        store_vector(b.first_moment + i, state.first_moment);
        store_vector(b.second_moment + i, state.second_moment);
    }
}

// Reads ahead: master and moments at `place`, gradient of the next block at i (its inspection comes before its step).
template <typename Gradient>
SPIPE_INLINE void prefetch(const BlockPointers& from, int64_t place, const StepMode& mode, int64_t i) {
    __builtin_prefetch(from.master + place);
    __builtin_prefetch(from.first_moment + place);
    __builtin_prefetch(from.second_moment + place);
    __builtin_prefetch(static_cast<const typename Gradient::Storage*>(mode.next.gradient) + i);
}

template <typename Gradient, typename Weight, bool logged>
SPIPE_INLINE void step_vector(const Constants& c, const BlockPointers& b, int64_t i, const StepMode& mode,
                              LogWriter* writer, UndoLog* log) {
    const State old = load_state(b, i);
    if (!logged && mode.snapshot.master != nullptr) put_state(mode.snapshot, i, old, mode.stream_snapshot);
    const Step step = stepped(c, load_gradient<Gradient>(b, i) * c.gradient_scale, old);
    put_state(b, i, step.now, mode.stream_state);
    put_weight<Weight>(b, i, step.now.master, mode);
    if (logged) log_vector(c, old, step, b.count, i, *writer, *log);
}

// The elements after the last whole vector, in vectors of their own: zeros follow them, which step to zeros.
template <typename Storage>
struct Tail {
    Storage elements[width] = {};
    void fill(const void* from, int64_t i, int64_t count) {
        __builtin_memcpy(elements, static_cast<const Storage*>(from) + i, sizeof(Storage) * (count - i));
    }
    void drain(void* to, int64_t i, int64_t count) const {
        __builtin_memcpy(static_cast<Storage*>(to) + i, elements, sizeof(Storage) * (count - i));
    }
};

template <typename Gradient, typename Weight>
struct BlockTail {
    Tail<typename Gradient::Storage> gradient, gradient2;
    Tail<float> master, first_moment, second_moment;
    Tail<typename Weight::Storage> weight;

    // Pointers that make place i of the block the first element of these arrays.
    BlockPointers fill(const BlockPointers& b, int64_t i) {
        gradient.fill(b.gradient, i, b.count);
        if (b.gradient2 != nullptr) gradient2.fill(b.gradient2, i, b.count);
        master.fill(b.master, i, b.count);
        first_moment.fill(b.first_moment, i, b.count);
        second_moment.fill(b.second_moment, i, b.count);
        return {gradient.elements - i,
                b.gradient2 == nullptr ? nullptr : gradient2.elements - i,
                master.elements - i,
                first_moment.elements - i,
                second_moment.elements - i,
                weight.elements - i,
                b.count};
    }
    void drain(const BlockPointers& b, int64_t i) const {
        master.drain(b.master, i, b.count);
        first_moment.drain(b.first_moment, i, b.count);
        second_moment.drain(b.second_moment, i, b.count);
    }
};

template <typename Gradient, typename Weight, bool logged>
SPIPE_INLINE void step_block(const AdamScalars& scalars, const BlockPointers& block, const StepMode& given,
                             UndoLog* log) {
    // Copies, which the compiler knows that no store changes.
    const Constants c = constants(scalars);
    const BlockPointers b = block;
    const StepMode mode = given;
    LogWriter memory = {};
    LogWriter* const writer = logged ? &memory : nullptr;
    if (logged) {
        memory.destination = log->corrections;
        memory.streaming = log->streaming;
    }
    const int64_t whole = b.count / width * width;
    const int64_t ahead = mode.prefetch_elements;
    const int64_t own = ahead > 0 ? (whole > ahead ? whole - ahead : 0) : whole;
    int64_t i = 0;
    for (; i < own; i += width) {
        if (ahead > 0) prefetch<Gradient>(b, i + ahead, mode, i);
        step_vector<Gradient, Weight, logged>(c, b, i, mode, writer, log);
    }
    for (; i < whole; i += width) {
        prefetch<Gradient>(mode.next, i + ahead - whole, mode, i);
        step_vector<Gradient, Weight, logged>(c, b, i, mode, writer, log);
    }
    if (i < b.count) {
        BlockTail<Gradient, Weight> tail;
        StepMode plain = mode;
        plain.stream_weight = plain.stream_state = false;
        step_vector<Gradient, Weight, logged>(c, tail.fill(b, i), i, plain, writer, log);
        tail.drain(b, i);
        tail.weight.drain(b.weight, i, b.count);
    }
    if (logged) LogWriter::finish(memory, b.count);
}

template <typename Gradient, typename Weight>
void step(const AdamScalars& scalars, const BlockPointers& block, const StepMode& mode) {
    step_block<Gradient, Weight, false>(scalars, block, mode, nullptr);
}

template <typename Gradient, typename Weight>
void logged_step(const AdamScalars& scalars, const BlockPointers& block, const StepMode& mode, UndoLog& log) {
    step_block<Gradient, Weight, true>(scalars, block, mode, &log);
}

template <typename Weight>
void round_weight(const float* master, void* weight_bytes, int64_t count) {
    auto* const weight = static_cast<typename Weight::Storage*>(weight_bytes);
    int64_t i = 0;
    for (; i + width <= count; i += width) store_vector(weight + i, Weight::round(load_vector<F>(master + i)));
    if (i == count) return;
    Tail<float> values;
    values.fill(master, i, count);
    Tail<typename Weight::Storage> rounded;
    store_vector(rounded.elements, Weight::round(load_vector<F>(values.elements)));
    rounded.drain(weight, i, count);
}

template <bool streaming>
void copy(void* destination, const void* source, int64_t num_bytes) {
    constexpr int64_t step_bytes = 4 * width;
    auto* const to = static_cast<char*>(destination);
    const auto* const from = static_cast<const char*>(source);
    int64_t i = 0;
    for (; i + step_bytes <= num_bytes; i += step_bytes) put<streaming>(to + i, load_vector<F>(from + i));
    __builtin_memcpy(to + i, from + i, static_cast<uint64_t>(num_bytes - i));
}

void publish() {
    stream_fence();
}
