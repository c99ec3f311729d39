#include "step_job.hpp"

#include <algorithm>
#include <stdexcept>

#include "tuning.hpp"

namespace spipe {
namespace {

std::vector<int64_t> element_counts(const std::vector<Parameter>& parameters) {
    std::vector<int64_t> counts;
    counts.reserve(parameters.size());
    for (const Parameter& parameter : parameters) counts.push_back(parameter.count);
    return counts;
}

// Large enough that claiming costs nothing, small enough that all workers end together.
int64_t blocks_per_chunk(int64_t num_blocks, int num_threads) {
    return std::clamp<int64_t>(num_blocks / (int64_t{8} * num_threads), 1, tuning().chunk_blocks);
}

// Escapes of one block, before their number is known.
Escape* escape_scratch() {
    thread_local const std::unique_ptr<Escape[]> memory(new Escape[3 * block_elements]);
    return memory.get();
}

constexpr uintptr_t page_bytes = 4096;

uint64_t mixed(uint64_t x) {  // splitmix64
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

bool aligned(const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % 64 == 0;
}

}  // namespace

uint64_t step_seed(uint64_t seed, int64_t step) {
    return mixed(mixed(seed) ^ static_cast<uint64_t>(step));
}

uint64_t random_key(uint64_t seed_of_step, uint64_t stream, int64_t first_element) {
    return mixed(mixed(seed_of_step ^ stream) ^ static_cast<uint64_t>(first_element));
}

BucketData::BucketData(std::vector<Parameter> given, const Hyperparameters& common, int num_threads)
    : parameters(std::move(given)),
      index(element_counts(parameters)),
      groups(parameters, common),
      chunk_blocks(blocks_per_chunk(index.num_blocks(), num_threads)),
      outcomes(static_cast<size_t>(index.num_blocks()), Outcome::untouched) {}

void BucketData::first_touch(WorkerPool& pool) const {
    std::vector<std::pair<uintptr_t, uintptr_t>> ranges;
    for (const Parameter& p : parameters) {
        const auto add = [&](uintptr_t begin, Dtype dtype) {
            if (begin != 0)
                ranges.emplace_back(begin, begin + static_cast<uintptr_t>(p.count * bytes_per_element(dtype)));
        };
        add(p.gradient, p.gradient_dtype);
        add(p.gradient2, p.gradient_dtype);
        for (uintptr_t state : {p.master, p.first_moment, p.second_moment}) add(state, Dtype::fp32);
        add(p.weight, p.weight_dtype);
    }
    std::sort(ranges.begin(), ranges.end());
    // Neighbours together, with the padding between them: many small parameters are as quick as a few large ones.
    size_t last = 0;
    for (size_t i = 1; i < ranges.size(); ++i) {
        if (ranges[i].first - ranges[last].second < 64) {
            ranges[last].second = ranges[i].second;
        } else {
            ranges[++last] = ranges[i];
        }
    }
    ranges.resize(last + 1);
    for (const auto& [begin, end] : ranges) {
        pool.first_touch(reinterpret_cast<char*>(begin), static_cast<int64_t>(end - begin));
    }
    undo.first_touch(pool);
}

void BucketData::place(const WorkerPool& pool) {
    placed = true;
    const size_t num_domains = pool.domains().size();
    if (num_domains == 1) return;
    std::vector<uintptr_t> pages;
    for (int64_t chunk = 0; chunk < num_chunks(); ++chunk) {
        const Block block = index.at(chunk * chunk_blocks);
        pages.push_back(reinterpret_cast<uintptr_t>(pointers_of(parameters[block.parameter], block).master) &
                        ~(page_bytes - 1));
    }
    const std::vector<int> nodes = nodes_of_pages(pages);
    std::vector<std::vector<int64_t>> chunks_of(num_domains);
    for (size_t chunk = 0; chunk < nodes.size(); ++chunk) {
        size_t domain = 0;
        while (domain < num_domains && pool.domains()[domain].node != nodes[chunk]) ++domain;
        if (domain == num_domains) return;  // unknown, or on a node without workers
        chunks_of[domain].push_back(static_cast<int64_t>(chunk));
    }
    for (const auto& chunks : chunks_of) {
        order.insert(order.end(), chunks.begin(), chunks.end());
        ends.push_back(static_cast<int64_t>(order.size()));
    }
}

std::vector<int64_t> BucketData::domain_ends(const WorkerPool& pool) const {
    return ends.empty() ? pool.split_over_domains(num_chunks()) : ends;
}

StepJob::StepJob(BucketData& bucket, const StepPlan& plan, const WorkerPool& pool)
    : Job(bucket.domain_ends(pool)),
      bucket_(bucket),
      plan_(plan),
      kernels_(adam_kernels(instruction_set())),
      fail_at_block_(bucket.fail_at_block) {
    bucket.fail_at_block = -1;
}

void StepJob::run(int64_t place) {
    const int64_t chunk = bucket_.chunk_at(place);
    const int64_t first = chunk * bucket_.chunk_blocks;
    const int64_t last = std::min(first + bucket_.chunk_blocks, bucket_.index.num_blocks()) - 1;
    if (plan_.undo == Rollback::delta) bucket_.undo.start_chunk(chunk);
    Block block = bucket_.index.at(first);
    BlockPointers at = pointers_of(bucket_.parameters[block.parameter], block);
    for (int64_t number = first;; ++number) {
        if (number == fail_at_block_) throw std::runtime_error("failure of a block, as a test asked for");
        const Block next = number < last ? bucket_.index.next(block) : block;
        const BlockPointers next_at = pointers_of(bucket_.parameters[next.parameter], next);
        bucket_.outcomes[static_cast<size_t>(number)] = step(number, chunk, block, at, next_at);
        if (number == last) break;
        block = next;
        at = next_at;
    }
    kernels_.fence();
}

Outcome StepJob::step(int64_t number, int64_t chunk, const Block& block, const BlockPointers& at,
                      const BlockPointers& next) {
    const Parameter& p = bucket_.parameters[block.parameter];
    if (inspect(number, p, at)) {
        bypassed_.fetch_add(1, std::memory_order_relaxed);
        return Outcome::bypassed;
    }
    if (plan_.inspect_only) return Outcome::untouched;
    const AdamScalars& scalars = bucket_.scalars[bucket_.groups.of(block.parameter)];
    const auto gradient = static_cast<size_t>(p.gradient_dtype);
    const auto weight = static_cast<size_t>(p.weight_dtype);
    StepMode mode{
        plan_.prefetch_elements, next, plan_.stream_weight && aligned(at.weight), false, plan_.stochastic, 0, {},
        plan_.stream_undo};
    mode.stream_state =
        plan_.stream_state && aligned(at.master) && aligned(at.first_moment) && aligned(at.second_moment);
    if (plan_.stochastic) mode.random_key = random_key(plan_.random_seed, p.random_stream, block.first);
    const CopyBytes copy = kernels_.copy[plan_.stream_undo ? 1 : 0];
    const bool keep_weight = plan_.stochastic && p.weight_dtype != Dtype::fp32;
    if (keep_weight && plan_.undo != Rollback::automatic) bucket_.undo.save_weight(copy, p, block);
    if (plan_.undo == Rollback::delta) {
        const auto block_in_chunk = static_cast<uint32_t>(number - chunk * bucket_.chunk_blocks);
        UndoLog log = bucket_.undo.empty_log(block, block_in_chunk);
        log.streaming = plan_.stream_undo;
        log.escapes = escape_scratch();
        kernels_.logged_step[gradient][weight](scalars, at, mode, log);
        bucket_.undo.append(chunk, log);
    } else {
        if (plan_.undo == Rollback::snapshot) mode.snapshot = bucket_.undo.snapshot_of(block);
        kernels_.step[gradient][weight](scalars, at, mode);
    }
    return Outcome::stepped;
}

// True if the block must be bypassed.
bool StepJob::inspect(int64_t number, const Parameter& p, const BlockPointers& at) {
    const AdamScalars& scalars = bucket_.scalars.front();  // the scale is the same for all groups
    const Inspection seen = kernels_.inspect[static_cast<size_t>(p.gradient_dtype)](
        at, scalars.gradient_scale, plan_.with_sums, plan_.undo == Rollback::delta);
    if (plan_.with_sums) bucket_.block_sums[static_cast<size_t>(number)] = seen.sum_of_squares;
    if (plan_.undo == Rollback::delta) bucket_.undo.set_checksum(number, seen.checksum);
    return seen.nonfinite;
}

RollbackJob::RollbackJob(BucketData& bucket, Rollback undo, bool with_weights, const WorkerPool& pool)
    : Job(bucket.domain_ends(pool)),
      bucket_(bucket),
      undo_(undo),
      with_weights_(with_weights),
      kernels_(adam_kernels(instruction_set())) {}

void RollbackJob::run(int64_t place) {
    const int64_t chunk = bucket_.chunk_at(place);
    const int64_t first = chunk * bucket_.chunk_blocks;
    const int64_t last = std::min(first + bucket_.chunk_blocks, bucket_.index.num_blocks()) - 1;
    Block block = bucket_.index.at(first);
    size_t position = 0;
    for (int64_t number = first;; ++number) {
        Outcome& outcome = bucket_.outcomes[static_cast<size_t>(number)];
        if (undo_ == Rollback::delta) {
            const UndoLog log = bucket_.undo.log_of(block, chunk, static_cast<uint32_t>(number - first), position);
            if (outcome == Outcome::stepped) restore(block, number, &log);
        } else if (outcome == Outcome::stepped) {
            restore(block, number, nullptr);
        }
        outcome = Outcome::untouched;
        if (number == last) return;
        block = bucket_.index.next(block);
    }
}

void RollbackJob::restore(const Block& block, int64_t number, const UndoLog* log) {
    const Parameter& p = bucket_.parameters[block.parameter];
    const BlockPointers at = pointers_of(p, block);
    if (log != nullptr) {
        const auto gradient = static_cast<size_t>(p.gradient_dtype);
        const AdamScalars& scalars = bucket_.scalars[bucket_.groups.of(block.parameter)];
        if (kernels_.inspect[gradient](at, scalars.gradient_scale, false, true).checksum !=
            bucket_.undo.checksum(number)) {
            throw std::runtime_error("the gradient of parameter " + std::to_string(block.parameter) +
                                     " has changed since the step that is rolled back; an undo log needs it as it was");
        }
        kernels_.undo[gradient](scalars, at, *log);
    } else {
        bucket_.undo.restore(p, block);
    }
    if (with_weights_ && p.weight_dtype != Dtype::fp32) {
        bucket_.undo.restore_weight(p, block);
    } else {
        kernels_.round_weight[static_cast<size_t>(p.weight_dtype)](at.master, at.weight, at.count);
    }
}

}  // namespace spipe
