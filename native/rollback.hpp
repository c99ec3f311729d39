// The ways to make a speculative step undoable, and the memory that each one needs.
#pragma once

#include <cstdint>
#include <string>

namespace spipe {

enum class Rollback {
    snapshot,   // 12 bytes an element: the old master and moments
    delta,      // about 3: corrections to the arithmetic inverse (see UndoLog)
    defer,      // none: a speculative step only looks at the gradients, the commit steps
    automatic,  // delta if the memory suffices, else defer; see choose_rollback
};

Rollback rollback_of_name(const std::string& name);
const char* name_of_rollback(Rollback rollback);

// Bytes an element to plan with: delta includes escapes as gradients of real training make them.
constexpr double snapshot_bytes_per_element = 12;
constexpr double delta_bytes_per_element = 3.5;

// What `automatic` becomes for so many elements. Delta costs less time and less memory than a snapshot, so a snapshot
// is taken only where some beta is 0: then the new moment tells nothing of the old one and every element escapes.
Rollback choose_rollback(int64_t num_elements, bool some_beta_is_zero, int64_t budget_bytes);

// Half of what the kernel and the control group leave to this process; the default budget.
int64_t default_undo_budget_bytes();

}  // namespace spipe
