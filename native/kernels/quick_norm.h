// LayerNorm without exact quotients. Most codes y = (t * g + b) >> shift do not depend on the last bits of t; if both
// bounds of t * g + b that are derived below give the same code, that code is y. Kernels use exact quotients to
// recompute the rows in which the bounds give different codes.
//
// With the names of Norm (kernels.h), n = C * v - M1, d = isqrt(4^j * D) and t = round(tau) with
// tau = 2^(24 + j) * n / d. Let n' = floor(n * 2^(j - 6)), rho = min(floor(2^61 / d), 2^31 - 1) and
// T = floor(n' * rho / 2^32). Then t - 2 * T is one of -1 .. 4, because of two bounds:
// - tau - n' * rho / 2^31 is in (-1, 2): less than 1 comes from rho, because |n'| < 2^31, and less than 1 from the
//   floor of n'.
// - n' * rho / 2^31 - 2 * T is in [0, 2).
//
// |n'| < 2^31 because |n| < 64 * sqrt(D) and D * 4^j < 2^62 (fits_i32). So (t * g + b) / 2 is between T * g + low and
// T * g + low + 5 * |g| / 2 + 1/2 with low = floor((b + min(-g, 4 * g)) / 2). All of this also holds for g * 2^m and
// b * 2^m, with a shift that is larger by m. m is chosen so that |g * 2^m| < 2^30: the two bounds, divided by 2^32 and
// rounded down, then differ by at most 1.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "core/aligned.h"
#include "kernels/kernels.h"

namespace fqvit {

// The constants of a Norm for this method. Must outlive the Norm.
class QuickNorm {
public:
    // Sets norm.quick_g, quick_b and quick_shift if the method applies and rarely fails. largest: bound of |t * g + b|
    void set(Norm& norm, std::int64_t largest) {
        norm.quick_g = nullptr;
        if (!norm.fits_i32 || norm.channels % 8 != 0) return;
        std::int64_t most = 0;
        for (std::int64_t c = 0; c < norm.channels; ++c) most = std::max(most, std::abs(std::int64_t{norm.g[c]}));
        int m = 0;
        while (m < 30 && most < LIMIT_G >> (m + 1) && largest < LIMIT_SUM >> (m + 1)) ++m;
        const int shift = norm.shift + m - 33;
        // The bounds give different codes for one code in 2^shift. If more than one row in 8 had to be recomputed,
        // exact quotients for all rows would be faster.
        if (most >= LIMIT_G || largest >= LIMIT_SUM || shift < 0 || shift > 31) return;
        if (norm.channels > (std::int64_t{1} << shift) / 8) return;
        // Vectors of 16 channels also read the next element of g.
        g_.resize(static_cast<std::size_t>(round_up(norm.channels, std::int64_t{16}) + 16));
        b_.resize(g_.size());
        for (std::int64_t c = 0; c < norm.channels; ++c) {
            const std::int64_t g = norm.g[c] * (std::int64_t{1} << m), b = norm.b[c] * (std::int64_t{1} << m);
            const std::int64_t half = c % 2 * 8 + c % 16 / 2;  // 16 channels in the order 0 2 .. 14 1 3 .. 15
            g_[static_cast<std::size_t>(c)] = static_cast<std::int32_t>(g);
            b_[static_cast<std::size_t>(c / 16 * 16 + half)] = (b + std::min(-g, 4 * g)) >> 1;
        }
        norm.quick_g = g_.data(), norm.quick_b = b_.data(), norm.quick_shift = shift;
    }

private:
    static constexpr std::int64_t LIMIT_G = std::int64_t{1} << 30, LIMIT_SUM = std::int64_t{1} << 61;

    AlignedVector<std::int32_t> g_;
    AlignedVector<std::int64_t> b_;
};

}  // namespace fqvit
