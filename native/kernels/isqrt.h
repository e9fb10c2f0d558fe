// The square root of LayerNorm, for vector kernels.
#pragma once

#include <cstdint>

namespace fqvit {

// floor(sqrt(x)) for 2^60 <= x < 2^62: an upper bound from a table, two Newton steps, then decrements.
inline std::int64_t isqrt_normalized(std::uint64_t x) {
    static constexpr struct Table {
        std::uint32_t start[256] = {};
        constexpr Table() {
            for (std::uint64_t i = 64; i < 256; ++i) {
                std::uint64_t root = 1u << 30;
                while (root * root < (i + 1) << 54) root += 1u << 22;  // at least sqrt((i + 1) * 2^54)
                start[i] = static_cast<std::uint32_t>(root);
            }
        }
    } table;
    std::uint64_t root = table.start[x >> 54];
    root = (root + x / root) / 2;  // never below the exact root; squares the relative error
    root = (root + x / root) / 2;
    while (root * root > x) --root;
    return static_cast<std::int64_t>(root);
}

}  // namespace fqvit
