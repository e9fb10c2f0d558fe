// The scale of one row of LayerNorm, for vector kernels.
#pragma once

#include <cstdint>

#include "kernels/isqrt.h"
#include "kernels/kernels.h"

namespace fqvit {

// M1 = sum v and M2 = sum v^2 of a row, with v as in Norm (kernels.h).
struct NormMoments {
    std::int64_t sum, squares;
};

// d = isqrt(D * 4^j), with D and j as in Norm, and its reciprocal rho = floor(2^61 / d), saturated to i32.
struct NormScale {
    std::int64_t sum, d, rho;
    int j;
};

inline NormScale norm_scale(const Norm& norm, NormMoments m) {
    const std::int64_t big_d = norm.channels * m.squares - m.sum * m.sum + norm.epsilon;
    const int j = (61 - (63 - __builtin_clzll(static_cast<std::uint64_t>(big_d)))) >> 1;
    const std::int64_t d = isqrt_normalized(static_cast<std::uint64_t>(big_d) << 2 * j);
    const std::int64_t rho = (std::int64_t{1} << 61) / d;
    return {m.sum, d, rho < 0x7fffffff ? rho : 0x7fffffff, j};
}

}  // namespace fqvit
