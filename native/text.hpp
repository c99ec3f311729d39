// Text in and out without C++ streams: where the module has a libstdc++ of its own beside torch's, streams crash.
#pragma once

#include <cstdint>
#include <string>

namespace spipe {

// Content of a file; empty if it cannot be read.
std::string text_of_file(const std::string& path);

// Like "%g".
std::string text_of(double value);
std::string hexadecimal(uintptr_t value);

}  // namespace spipe
