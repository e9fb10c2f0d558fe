#include "core/arena.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace fqvit {

ArenaPlan plan_arena(const std::vector<Lifetime>& buffers) {
    std::vector<std::size_t> order(buffers.size()), placed;
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return buffers[a].bytes > buffers[b].bytes; });
    ArenaPlan plan{std::vector<std::uint64_t>(buffers.size()), 0};
    for (const std::size_t i : order) {
        const Lifetime& buffer = buffers[i];
        std::vector<std::pair<std::uint64_t, std::uint64_t>> occupied;
        for (const std::size_t j : placed) {
            const Lifetime& other = buffers[j];
            if (other.first > buffer.last || buffer.first > other.last) continue;
            occupied.emplace_back(plan.offsets[j], plan.offsets[j] + other.bytes);
        }
        std::sort(occupied.begin(), occupied.end());
        std::uint64_t offset = 0;
        for (const auto& [begin, end] : occupied) {
            if (offset + buffer.bytes <= begin) break;
            offset = std::max(offset, end);
        }
        plan.offsets[i] = offset;
        plan.bytes = std::max(plan.bytes, offset + buffer.bytes);
        placed.push_back(i);
    }
    return plan;
}

}  // namespace fqvit
