// Fixed-point primitives, the same as in src/fqvit/ir/fixed.py. All arithmetic of a program is built from these.
// Plain 64-bit integers: this header compiles with -mgeneral-regs-only, which rejects floating-point code.
#pragma once

#include <cstdint>

namespace fqvit {

// floor(x / 2^shift + 1/2), shift 1..62. >> of a negative number floors (C++20).
inline std::int64_t round_shift(std::int64_t x, int shift) { return (x + (std::int64_t{1} << (shift - 1))) >> shift; }

// floor(acc * mult / 2^shift + 1/2): one rounding, ties up. |acc| < 2^31 and 0 <= mult < 2^31.
inline std::int64_t requantize(std::int64_t acc, std::int64_t mult, int shift) {
    return round_shift(acc * mult, shift);
}

// Saturates to 0..last.
inline std::int64_t clamp(std::int64_t value, std::int64_t last) { return value < 0 ? 0 : value > last ? last : value; }

// floor(a / b), b > 0.
inline std::int64_t floor_divide(std::int64_t a, std::int64_t b) {
    const std::int64_t quotient = a / b;
    return quotient - (a % b < 0 ? 1 : 0);
}

// floor(a / b + 1/2), b > 0: rounded once, ties up.
inline std::int64_t round_divide(std::int64_t a, std::int64_t b) { return floor_divide(a + b / 2, b); }

// The index of the highest set bit of x >= 1.
inline int ilog2(std::uint64_t x) {
    int index = 0;
    for (int step = 32; step > 0; step /= 2) {
        if (x >> step) {
            index += step;
            x >>= step;
        }
    }
    return index;
}

// log2(x) of x >= 1, rounded up if the bit below the highest is set (mantissa >= 1.5).
inline int ilog2_round(std::uint64_t x) {
    const int top = ilog2(x);
    return top + (top > 0 ? static_cast<int>((x >> (top - 1)) & 1) : 0);
}

// floor(sqrt(x)), 0 <= x < 2^62, one binary digit at a time.
inline std::int64_t isqrt(std::int64_t x) {
    std::int64_t root = 0;
    for (int bit = 30; bit >= 0; --bit) {
        const std::int64_t trial = root + (std::int64_t{1} << bit);
        if (trial * trial <= x) root = trial;
    }
    return root;
}

}  // namespace fqvit
