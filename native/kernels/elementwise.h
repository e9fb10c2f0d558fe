// Kernels of multiply, rotary, depthwise, max, mean and add: functions on plain pointers, in one table per instruction
// set, under the rules of kernels.h. elementwise_scalar.cpp is the readable version.
#pragma once

#include <cstdint>

namespace fqvit {

// y = clamp(round_shift(acc * mult, shift) + zero, 0, last) with one mult and one shift for the whole tensor.
struct TensorRequantization {
    std::int64_t mult;
    int shift;
    std::int32_t zero, last;
    bool wide;  // y is u16, else u8
    // The same for vectors: round_shift(acc * 2^lift * vector_mult, vector_shift), where vector_shift >= 32 and
    // |acc * 2^lift| < 2^31. A vector_shift of 0 means that no such constants exist.
    int lift;
    std::int32_t vector_mult;
    int vector_shift;
};

// acc = (a - a_zero) * (b - b_zero)
struct Product {
    std::int32_t a_zero, b_zero;
    bool wide_a, wide_b;
    TensorRequantization requantization;
};

// acc[c] = (x[c] - zero) * cosine[p] + (x[c - p + partner[p]] - zero) * sine[p], p = c mod period
struct Rotation {
    std::int64_t channels, period;
    std::int32_t zero;
    bool wide_in;
    const std::int32_t* partner;  // [period]
    TensorRequantization requantization;
    // For vectors. fits_i16: every x - zero fits in i16. by_eights: the period is a multiple of 8, and the partners of
    // each group of 8 channels are among the 8 channels that start at first[p / 8], at the positions lane[p].
    bool fits_i16, by_eights;
    const std::int32_t* first;
    const std::int32_t* lane;
};

// acc[c] = sum over k of rows[k][c] * w[k, c]
struct Taps {
    std::int64_t channels, pairs;
    bool wide_in;
    // i16 weights of two taps, the even one in the low half: [pairs][channels]. If the number of taps is odd, the last
    // weight is 0.
    const std::int32_t* weights;
};

// Rows of x to combine: x[r, c] is element r * stride + c.
struct Rows {
    std::int64_t count, stride;
    bool wide_in;
};

// acc[c] = sum over rows of (x[r, c] - zero[c]) * 2^alpha[c]
struct Average {
    Rows rows;
    const std::int32_t* zero;
    const std::int32_t* alpha;
    TensorRequantization requantization;
};

// acc[c] = (x[c] - zero[c]) * 2^alpha[c]
struct Centering {
    const std::int32_t* zero;
    const std::int32_t* alpha;
    bool wide_in;
};

struct ElementwiseKernels {
    void (*multiply)(const Product&, const void* a, const void* b, void* y, std::int64_t count);
    // One row of x. table: [period], the cosine in the low half of each entry, the sine in the high half.
    void (*rotary)(const Rotation&, const std::int32_t* table, const void* x, void* y);
    // rows: 2 * taps.pairs pointers, one to the input row of each tap.
    void (*depthwise)(const Taps&, const std::uint8_t* const* rows, std::int32_t* acc);
    // y[c] = max over rows of x[r, c], for `count` channels.
    void (*max)(const Rows&, const void* x, void* y, std::int64_t count);
    // y[c] = the requantized mean over rows, for `count` channels. channel: the first channel, at which x and y start.
    void (*mean)(const Average&, const void* x, void* y, std::int64_t channel, std::int64_t count);
    // One row of x.
    void (*center)(const Centering&, const void* x, std::int32_t* acc, std::int64_t channels);
};

extern const ElementwiseKernels elementwise_scalar;
extern const ElementwiseKernels elementwise_avx2;  // x86-64 only
extern const ElementwiseKernels elementwise_neon;  // AArch64 only

}  // namespace fqvit
