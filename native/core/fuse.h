// Ops joined where that keeps every bit: a linear map with the table or sum that follows it, and attention head by
// head.
#pragma once

#include <memory>
#include <vector>

#include "ops/ops.h"

namespace fqvit {

// `kept`: the values that a run returns, which must not vanish.
void fuse(std::vector<std::unique_ptr<Op>>& ops, const std::vector<int>& kept, const Machine& machine);

}  // namespace fqvit
