// A bucket cut into blocks, and the memory that makes a speculative step undoable.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "adam_kernel.hpp"
#include "parameter.hpp"
#include "rollback.hpp"
#include "worker_pool.hpp"

namespace spipe {

// Elements [first, first + count) of one parameter.
struct Block {
    size_t parameter;
    int64_t first;
    int64_t count;
    int64_t offset;  // elements from the start of the bucket
    int64_t slot;    // the same with every parameter padded to a multiple of 64 elements: its place in undo memory
};

// The blocks of several parameters of the given sizes, numbered through. All index arithmetic of the optimizer is here.
class BlockIndex {
  public:
    explicit BlockIndex(const std::vector<int64_t>& counts);
    int64_t num_blocks() const { return first_block_.back(); }
    int64_t num_elements() const { return first_element_.back(); }
    int64_t num_slots() const { return first_slot_.back(); }
    // Blocks [first_block_of(p), first_block_of(p + 1)) are those of parameter p.
    int64_t first_block_of(size_t parameter) const { return first_block_[parameter]; }
    // The block with this number; 0 <= block < num_blocks().
    Block at(int64_t block) const;
    // The one after `block`, without a search.
    Block next(const Block& block) const;

  private:
    Block within(size_t parameter, int64_t first) const;
    std::vector<int64_t> first_block_;    // of each parameter; one more at the end
    std::vector<int64_t> first_element_;  // likewise
    std::vector<int64_t> first_slot_;     // likewise
};

using CopyBytes = void (*)(void* destination, const void* source, int64_t num_bytes);

// Where a block of a parameter lies.
BlockPointers pointers_of(const Parameter& parameter, const Block& block);

// Undo data of one bucket. Allocated once; each block's part is written and read by one worker.
class UndoMemory {
  public:
    // Snapshot, delta or defer; `with_weights` also keeps 2-byte weights, where they are not the rounded masters.
    void allocate(Rollback rollback, const BlockIndex& index, int64_t num_chunks, bool with_weights);
    // Makes its pages exist. To be called before the first step.
    void first_touch(WorkerPool& pool) const;
    // Held; with `escapes` including the lists of escapes, which a step in flight may be changing.
    int64_t num_bytes(bool escapes) const;
    int64_t logged_bytes() const;  // needed by what was kept last: without room for escapes that are not there

    // Where a snapshot of the block's master and moments is kept.
    BlockPointers snapshot_of(const Block& block) const;
    void restore(const Parameter& parameter, const Block& block) const;
    void save_weight(CopyBytes copy, const Parameter& parameter, const Block& block);
    void restore_weight(const Parameter& parameter, const Block& block) const;

    void start_chunk(int64_t chunk) { escapes_[static_cast<size_t>(chunk)].clear(); }
    // A log to be filled, without room for escapes.
    UndoLog empty_log(const Block& block, uint32_t block_in_chunk);
    // Keeps the escapes of a block of this chunk; blocks come in order.
    void append(int64_t chunk, const UndoLog& log);
    // The log of a block. `position` counts through the escapes of the chunk; start with 0, in the order of blocks.
    UndoLog log_of(const Block& block, int64_t chunk, uint32_t block_in_chunk, size_t& position);
    uint32_t checksum(int64_t block_number) const { return checksums_[static_cast<size_t>(block_number)]; }
    void set_checksum(int64_t block_number, uint32_t checksum) {
        checksums_[static_cast<size_t>(block_number)] = checksum;
    }

  private:
    struct Free {
        void operator()(char* memory) const;
    };
    using Memory = std::unique_ptr<char, Free>;
    Memory reserve(int64_t num_bytes);

    Memory state_;    // snapshot: three arrays of padded(count) fp32 values for each block; delta: corrections
    Memory weights_;  // 2-byte weights
    std::vector<std::vector<Escape>> escapes_;  // of each chunk, in the order of its blocks
    std::vector<uint32_t> checksums_;           // of the gradient of each block
    int64_t reserved_bytes_ = 0;
    int64_t state_bytes_ = 0;
    int64_t weight_bytes_ = 0;
};

}  // namespace spipe
