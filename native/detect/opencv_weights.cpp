// The only floating-point arithmetic of a detector: + - * / and conversions, each rounded once as IEEE 754 defines. The
// results are the same on every platform if the compiler does not fuse a product with a sum, so CMakeLists.txt sets
// -ffp-contract=off.
#include "detect/opencv_weights.h"

#include <cfloat>
#include <cmath>
#include <limits>

#ifdef __FAST_MATH__
#error "detect/opencv_weights.cpp: compiled with -ffast-math, expected IEEE 754 arithmetic"
#endif

namespace fqvit {
namespace {

static_assert(std::numeric_limits<double>::is_iec559 && std::numeric_limits<float>::is_iec559);
static_assert(FLT_EVAL_METHOD == 0, "x87 and wider evaluation would round float arithmetic differently");

// Rounds 0 <= x <= 2048 to an integer, ties to even, in every rounding mode.
std::int32_t round_even(float x) {
    const auto whole = static_cast<std::int32_t>(x);
    const float rest = x - static_cast<float>(whole);
    return rest > 0.5F || (rest == 0.5F && whole % 2 == 1) ? whole + 1 : whole;
}

}  // namespace

OpencvWeights opencv_weights(std::int64_t old_side, std::int64_t new_side) {
    constexpr float ONE = 2048;
    const double scale = 1.0 / (static_cast<double>(new_side) / static_cast<double>(old_side));
    OpencvWeights out;
    for (std::int64_t i = 0; i < new_side; ++i) {
        const double position = (static_cast<double>(i) + 0.5) * scale - 0.5;
        const auto at = static_cast<float>(position);
        const float first = std::floor(at), share = at - first;
        out.first.push_back(static_cast<std::int64_t>(first));
        out.after.push_back(round_even(share * ONE));
        out.before.push_back(round_even((1.0F - share) * ONE));
    }
    return out;
}

}  // namespace fqvit
