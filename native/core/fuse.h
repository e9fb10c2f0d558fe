// Fuses ops where every bit stays the same: a product with the table or sum that follows it, a product with the gather
// before it, and the ops of attention into whole heads.
#pragma once

#include <memory>
#include <vector>

#include "ops/op.h"

namespace fqvit {

// outputs: values that a run returns, so they must stay.
void fuse(std::vector<std::unique_ptr<Op>>& ops, const std::vector<int>& outputs, const KernelSet& kernels);

}  // namespace fqvit
