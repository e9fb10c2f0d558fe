// The arena planner: places all buffers of one image in one allocation.
#pragma once

#include <cstdint>
#include <vector>

namespace fqvit {

// The size of a buffer and its lifetime: the index of the op that writes it and of the last op that reads it.
struct Lifetime {
    std::uint64_t bytes;
    int first, last;
};

struct ArenaPlan {
    std::vector<std::uint64_t> offsets;  // one per buffer
    std::uint64_t bytes;                 // of the whole arena
};

// Greedy by size: places buffers from the largest to the smallest, each at the lowest offset where it overlaps no
// buffer that is in use at the same time. Offsets are multiples of 64 if all sizes are.
ArenaPlan plan_arena(const std::vector<Lifetime>& buffers);

}  // namespace fqvit
