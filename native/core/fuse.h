// Fuses ops without changing a bit of the results: a linear op with the lookup or add that follows it and with the take
// before it, a depthwise op with the lookup that follows it, and up to seven ops of an attention layer into one.
#pragma once

#include <memory>
#include <vector>

#include "ops/op.h"

namespace fqvit {

// outputs: values that a run returns, so fusion must not remove them. owns_weights: no other engine uses the packed
// weights, so fusion may reorder their channels.
void fuse(std::vector<std::unique_ptr<Op>>& ops, const std::vector<int>& outputs, const KernelSet& kernels,
          bool owns_weights);

}  // namespace fqvit
