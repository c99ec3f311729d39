#include "tuning.hpp"

#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <stdexcept>

namespace spipe {
namespace {

std::mutex mutex;
Tuning current;

}  // namespace

Tuning tuning() {
    std::lock_guard<std::mutex> lock(mutex);
    return current;
}

void set_tuning(const Tuning& choice) {
    if (choice.prefetch_elements < 0 || choice.prefetch_elements > 4096 || choice.prefetch_elements % 64 != 0) {
        throw std::invalid_argument("prefetch_elements is " + std::to_string(choice.prefetch_elements) +
                                    "; it must be a multiple of 64 between 0 and 4096");
    }
    if (choice.chunk_blocks < 1 || choice.chunk_blocks > 1024) {
        throw std::invalid_argument("chunk_blocks is " + std::to_string(choice.chunk_blocks) +
                                    "; it must be between 1 and 1024");
    }
    std::lock_guard<std::mutex> lock(mutex);
    current = choice;
}

Stores stores_of_name(const std::string& name) {
    if (name == "auto") return Stores::automatic;
    if (name == "plain") return Stores::plain;
    if (name == "weight") return Stores::weight;
    if (name == "all") return Stores::all;
    throw std::invalid_argument("stores is '" + name + "'; it must be 'auto', 'plain', 'weight' or 'all'");
}

int64_t cache_bytes() {
#if defined(_SC_LEVEL3_CACHE_SIZE)
    static const int64_t bytes = std::max<int64_t>({sysconf(_SC_LEVEL3_CACHE_SIZE), sysconf(_SC_LEVEL2_CACHE_SIZE), 0});
    return bytes;
#else
    return 0;
#endif
}

}  // namespace spipe
