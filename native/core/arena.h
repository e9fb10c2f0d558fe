// The arena planner: places all buffers of one image in one allocation.
#pragma once

#include <cstddef>
#include <vector>

namespace fqvit {

// When a buffer is in use: from the op that writes it to the last op that reads it, both inclusive, as indices of ops.
struct Lifetime {
    std::size_t bytes;
    int first, last;
};

struct ArenaPlan {
    std::vector<std::size_t> offsets;  // one per buffer
    std::size_t bytes;                 // of the whole arena
};

// Greedy by size: places the largest buffer first, each at the lowest offset where it overlaps no buffer that is in use
// at the same time. Offsets are multiples of 64 if all sizes are.
ArenaPlan plan_arena(const std::vector<Lifetime>& buffers);

}  // namespace fqvit
