#include "bucket.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace spipe {

BlockIndex::BlockIndex(const std::vector<int64_t>& counts) {
    first_block_.reserve(counts.size() + 1);
    first_element_.reserve(counts.size() + 1);
    first_block_.push_back(0);
    first_element_.push_back(0);
    for (int64_t count : counts) {
        first_block_.push_back(first_block_.back() + (count + block_elements - 1) / block_elements);
        first_element_.push_back(first_element_.back() + count);
    }
}

Block BlockIndex::within(size_t parameter, int64_t first) const {
    const int64_t begin = first_element_[parameter];
    const int64_t parameter_count = first_element_[parameter + 1] - begin;
    return {parameter, first, std::min(block_elements, parameter_count - first), begin + first};
}

Block BlockIndex::at(int64_t block) const {
    const auto after = std::upper_bound(first_block_.begin(), first_block_.end(), block);
    const auto parameter = static_cast<size_t>(after - first_block_.begin()) - 1;
    return within(parameter, (block - first_block_[parameter]) * block_elements);
}

Block BlockIndex::next(const Block& block) const {
    const int64_t parameter_count = first_element_[block.parameter + 1] - first_element_[block.parameter];
    const int64_t first = block.first + block_elements;
    return first < parameter_count ? within(block.parameter, first) : within(block.parameter + 1, 0);
}

void Snapshot::allocate(int64_t num_elements) {
    if (memory_ != nullptr) return;
    // Whole huge pages: the first step would otherwise spend most of its time in page faults.
    const size_t huge_page = size_t{2} << 20;
    const size_t wanted = static_cast<size_t>(num_elements) * 3 * sizeof(float);
    const size_t alignment = wanted >= huge_page ? huge_page : 64;
    const size_t num_bytes = (wanted + alignment - 1) / alignment * alignment;
    memory_.reset(static_cast<float*>(std::aligned_alloc(alignment, num_bytes)));
    if (memory_ == nullptr) throw std::bad_alloc();
    if (alignment == huge_page) madvise(memory_.get(), num_bytes, MADV_HUGEPAGE);
    num_bytes_ = static_cast<int64_t>(num_bytes);
}

void Snapshot::Free::operator()(float* memory) const {
    std::free(memory);
}

void Snapshot::save(const Parameter& parameter, const Block& block) {
    float* const saved = memory_.get() + 3 * block.offset;
    const size_t num_bytes = static_cast<size_t>(block.count) * sizeof(float);
    std::memcpy(saved, element_pointer<float>(parameter.master, block.first), num_bytes);
    std::memcpy(saved + block.count, element_pointer<float>(parameter.first_moment, block.first), num_bytes);
    std::memcpy(saved + 2 * block.count, element_pointer<float>(parameter.second_moment, block.first), num_bytes);
}

void Snapshot::restore(const Parameter& parameter, const Block& block) const {
    const float* const saved = memory_.get() + 3 * block.offset;
    const size_t num_bytes = static_cast<size_t>(block.count) * sizeof(float);
    std::memcpy(element_pointer<float>(parameter.master, block.first), saved, num_bytes);
    std::memcpy(element_pointer<float>(parameter.first_moment, block.first), saved + block.count, num_bytes);
    std::memcpy(element_pointer<float>(parameter.second_moment, block.first), saved + 2 * block.count, num_bytes);
}

}  // namespace spipe
