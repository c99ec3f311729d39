// Choices that change speed and no bit of a result. The defaults are what measurements favour.
#pragma once

#include <cstdint>
#include <string>

namespace spipe {

enum class Stores {
    automatic,  // the weight past the caches if the optimizer's buffers exceed them, else plain
    plain,
    weight,  // the weight past the caches: it is not read before, so a plain store would load its line first
    all      // master and moments too
};

struct Tuning {
    Stores stores = Stores::automatic;
    int64_t prefetch_elements = 512;
    int64_t chunk_blocks = 16;  // largest share of a worker, in blocks
    bool stream_undo = true;    // undo data past the caches
};

Tuning tuning();
void set_tuning(const Tuning& choice);
// Throws std::invalid_argument for a name that is not "auto", "plain", "weight" or "all".
Stores stores_of_name(const std::string& name);

// Bytes of the last-level cache; 0 if unknown.
int64_t cache_bytes();

}  // namespace spipe
