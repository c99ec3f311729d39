#include "bucket.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace spipe {
namespace {

template <typename Element>
Element* element_at(uintptr_t base, int64_t index) {
    return reinterpret_cast<Element*>(base) + index;
}

void* address_of(uintptr_t base, int64_t index, Dtype dtype) {
    return reinterpret_cast<void*>(base + static_cast<uintptr_t>(index * bytes_per_element(dtype)));
}

size_t as_size(int64_t num_bytes) {
    return static_cast<size_t>(num_bytes);
}

}  // namespace

BlockIndex::BlockIndex(const std::vector<int64_t>& counts) : first_block_{0}, first_element_{0}, first_slot_{0} {
    for (std::vector<int64_t>* table : {&first_block_, &first_element_, &first_slot_}) {
        table->reserve(counts.size() + 1);
    }
    for (int64_t count : counts) {
        first_block_.push_back(first_block_.back() + (count + block_elements - 1) / block_elements);
        first_element_.push_back(first_element_.back() + count);
        first_slot_.push_back(first_slot_.back() + padded(count));
    }
}

Block BlockIndex::within(size_t parameter, int64_t first) const {
    const int64_t begin = first_element_[parameter];
    const int64_t parameter_count = first_element_[parameter + 1] - begin;
    return {parameter, first, std::min(block_elements, parameter_count - first), begin + first,
            first_slot_[parameter] + first};
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

BlockPointers pointers_of(const Parameter& p, const Block& block) {
    return {address_of(p.gradient, block.first, p.gradient_dtype),
            p.gradient2 == 0 ? nullptr : address_of(p.gradient2, block.first, p.gradient_dtype),
            element_at<float>(p.master, block.first),
            element_at<float>(p.first_moment, block.first),
            element_at<float>(p.second_moment, block.first),
            address_of(p.weight, block.first, p.weight_dtype),
            block.count};
}

void UndoMemory::Free::operator()(char* memory) const {
    std::free(memory);
}

UndoMemory::Memory UndoMemory::reserve(int64_t num_bytes) {
    // Whole huge pages: the first step would otherwise spend most of its time in page faults.
    const size_t huge_page = size_t{2} << 20;
    const size_t alignment = as_size(num_bytes) >= huge_page ? huge_page : 64;
    const size_t size = (as_size(num_bytes) + alignment - 1) / alignment * alignment;
    Memory memory(static_cast<char*>(std::aligned_alloc(alignment, size)));
    if (memory == nullptr) throw std::bad_alloc();
    if (alignment == huge_page) madvise(memory.get(), size, MADV_HUGEPAGE);
    reserved_bytes_ += static_cast<int64_t>(size);
    return memory;
}

void UndoMemory::allocate(Rollback rollback, const BlockIndex& index, int64_t num_chunks, bool with_weights) {
    if (state_ != nullptr || rollback == Rollback::defer) return;
    state_bytes_ = index.num_slots() * (rollback == Rollback::snapshot ? 12 : 3);
    Memory state = reserve(state_bytes_);
    if (with_weights) {
        weight_bytes_ = 2 * index.num_slots();
        weights_ = reserve(weight_bytes_);
    }
    if (rollback == Rollback::delta) {
        escapes_.resize(as_size(num_chunks));
        checksums_.resize(as_size(index.num_blocks()));
    }
    state_ = std::move(state);
}

void UndoMemory::first_touch(WorkerPool& pool) const {
    if (state_ != nullptr) pool.first_touch(state_.get(), state_bytes_);
    if (weights_ != nullptr) pool.first_touch(weights_.get(), weight_bytes_);
}

int64_t UndoMemory::num_bytes(bool escapes) const {
    int64_t bytes = reserved_bytes_ + static_cast<int64_t>(checksums_.size() * sizeof(uint32_t));
    bytes += static_cast<int64_t>(escapes_.size() * sizeof(std::vector<Escape>));
    if (!escapes) return bytes;
    for (const auto& chunk : escapes_) bytes += static_cast<int64_t>(chunk.capacity() * sizeof(Escape));
    return bytes;
}

int64_t UndoMemory::logged_bytes() const {
    int64_t bytes = state_bytes_ + static_cast<int64_t>(checksums_.size() * sizeof(uint32_t));
    for (const auto& chunk : escapes_) bytes += static_cast<int64_t>(sizeof(chunk) + chunk.size() * sizeof(Escape));
    return bytes;
}

BlockPointers UndoMemory::snapshot_of(const Block& block) const {
    const int64_t stride = padded(block.count);
    BlockPointers at{};
    at.master = reinterpret_cast<float*>(state_.get()) + 3 * block.slot;
    at.first_moment = at.master + stride;
    at.second_moment = at.first_moment + stride;
    at.count = block.count;
    return at;
}

void UndoMemory::restore(const Parameter& parameter, const Block& block) const {
    const BlockPointers to = pointers_of(parameter, block);
    const BlockPointers from = snapshot_of(block);
    const size_t num_bytes = 4 * as_size(block.count);
    std::memcpy(to.master, from.master, num_bytes);
    std::memcpy(to.first_moment, from.first_moment, num_bytes);
    std::memcpy(to.second_moment, from.second_moment, num_bytes);
}

void UndoMemory::save_weight(CopyBytes copy, const Parameter& parameter, const Block& block) {
    copy(weights_.get() + 2 * block.slot, pointers_of(parameter, block).weight, 2 * block.count);
}

void UndoMemory::restore_weight(const Parameter& parameter, const Block& block) const {
    std::memcpy(pointers_of(parameter, block).weight, weights_.get() + 2 * block.slot, 2 * as_size(block.count));
}

UndoLog UndoMemory::empty_log(const Block& block, uint32_t block_in_chunk) {
    return {reinterpret_cast<uint8_t*>(state_.get()) + 3 * block.slot, false, nullptr, 0, block_in_chunk};
}

void UndoMemory::append(int64_t chunk, const UndoLog& log) {
    std::vector<Escape>& escapes = escapes_[as_size(chunk)];
    escapes.insert(escapes.end(), log.escapes, log.escapes + log.num_escapes);
}

UndoLog UndoMemory::log_of(const Block& block, int64_t chunk, uint32_t block_in_chunk, size_t& position) {
    std::vector<Escape>& escapes = escapes_[as_size(chunk)];
    const size_t first = position;
    while (position < escapes.size() && escapes[position].where >> (Escape::index_bits + 2) == block_in_chunk) {
        ++position;
    }
    UndoLog log = empty_log(block, block_in_chunk);
    log.escapes = escapes.data() + first;
    log.num_escapes = static_cast<int64_t>(position - first);
    return log;
}

}  // namespace spipe
