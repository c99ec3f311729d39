#include "text.hpp"

#include <cinttypes>
#include <cstdio>
#include <memory>

namespace spipe {

std::string text_of_file(const std::string& path) {
    const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path.c_str(), "r"), std::fclose);
    if (!file) return "";
    char buffer[4096];
    std::string text;
    for (size_t count; (count = std::fread(buffer, 1, sizeof buffer, file.get())) > 0;) text.append(buffer, count);
    return text;
}

std::string text_of(double value) {
    char buffer[32];
    std::snprintf(buffer, sizeof buffer, "%g", value);
    return buffer;
}

std::string hexadecimal(uintptr_t value) {
    char buffer[32];
    std::snprintf(buffer, sizeof buffer, "0x%" PRIxPTR, value);
    return buffer;
}

}  // namespace spipe
