// Which vector instruction sets this machine has, and which one the kernels use.
#pragma once

#include <string>
#include <vector>

namespace spipe {

enum class InstructionSet { baseline = 0, avx2 = 1, avx512 = 2 };

// Names, slowest first: "baseline" everywhere; "avx2" and "avx512" where the processor and the kernel offer them.
std::vector<std::string> available_instruction_sets();

// The one in use: the widest available until `set_instruction_set` is called.
InstructionSet instruction_set();
std::string instruction_set_name();

// Throws std::invalid_argument for a name that is not available here. Jobs submitted later use it.
void set_instruction_set(const std::string& name);

}  // namespace spipe
