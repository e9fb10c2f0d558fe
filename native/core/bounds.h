// Upper bounds for overflow proofs. Arithmetic on bounds saturates at UNBOUNDED, which no proof accepts.
#pragma once

#include <cstdint>
#include <limits>

namespace fqvit {

constexpr std::int64_t UNBOUNDED = std::numeric_limits<std::int64_t>::max();

// All arguments are >= 0.
inline std::int64_t bound_add(std::int64_t a, std::int64_t b) { return a > UNBOUNDED - b ? UNBOUNDED : a + b; }
inline std::int64_t bound_multiply(std::int64_t a, std::int64_t b) {
    return b != 0 && a > UNBOUNDED / b ? UNBOUNDED : a * b;
}
inline std::int64_t bound_shift(std::int64_t a, int shift) { return bound_multiply(a, std::int64_t{1} << shift); }

}  // namespace fqvit
