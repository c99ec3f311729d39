// A bucket cut into blocks, and the snapshot that makes a speculative step undoable.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "adam_kernel.hpp"
#include "parameter.hpp"

namespace spipe {

// Elements [first, first + count) of one parameter. `offset` counts elements from the start of the bucket.
struct Block {
    size_t parameter;
    int64_t first;
    int64_t count;
    int64_t offset;
};

// The blocks of several parameters of the given sizes, numbered through. All index arithmetic of the optimizer is here.
class BlockIndex {
  public:
    explicit BlockIndex(const std::vector<int64_t>& counts);
    int64_t num_blocks() const { return first_block_.back(); }
    int64_t num_elements() const { return first_element_.back(); }
    // The block with this number; 0 <= block < num_blocks().
    Block at(int64_t block) const;
    // The one after `block`, without a search.
    Block next(const Block& block) const;

  private:
    Block within(size_t parameter, int64_t first) const;
    std::vector<int64_t> first_block_;    // of each parameter; one more at the end
    std::vector<int64_t> first_element_;  // likewise
};

// 12 bytes per element: master, first and second moment of each block, side by side.
class Snapshot {
  public:
    void allocate(int64_t num_elements);  // once; later calls do nothing
    int64_t num_bytes() const { return num_bytes_; }
    void save(const Parameter& parameter, const Block& block);
    void restore(const Parameter& parameter, const Block& block) const;

  private:
    struct Free {
        void operator()(float* memory) const;
    };
    std::unique_ptr<float, Free> memory_;
    int64_t num_bytes_ = 0;
};

template <typename Element>
Element* element_pointer(uintptr_t base, int64_t index) {
    return reinterpret_cast<Element*>(base) + index;
}

SPIPE_INLINE void* element_address(uintptr_t base, int64_t index, Dtype dtype) {
    return reinterpret_cast<void*>(base + static_cast<uintptr_t>(index * bytes_per_element(dtype)));
}

}  // namespace spipe
