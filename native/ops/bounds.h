// Bounds of per-channel parameters, shared by the ops that shift codes by alpha.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/value.h"
#include "ops/scope.h"

namespace fqvit {

inline std::int64_t largest_of(const std::vector<std::int32_t>& values) {
    return *std::max_element(values.begin(), values.end());
}
inline std::int64_t smallest_of(const std::vector<std::int32_t>& values) {
    return *std::min_element(values.begin(), values.end());
}

// Returns an upper bound of |(x - zero) * 2^alpha| for the worst-case zero point and alpha of all channels, as in
// Program.verify().
inline std::int64_t shifted_bound(const Value& x, const std::vector<std::int32_t>& zero,
                                  const std::vector<std::int32_t>& alpha) {
    return bound_shift(magnitude(x, smallest_of(zero), largest_of(zero)), static_cast<int>(largest_of(alpha)));
}

}  // namespace fqvit
