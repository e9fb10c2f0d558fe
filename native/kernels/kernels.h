// Kernels other than GEMM: the epilogue of a product, LayerNorm, attention, and elementwise ops. Functions on plain
// pointers, in one table per instruction set. kernels_scalar.cpp is the readable version; other tables fall back to it
// for parameters that they do not cover. No allocation, no exceptions, no floats.
//
// Per-channel parameters are always arrays of C entries, even if the program has one value for the whole tensor.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/elementwise.h"

namespace fqvit {

struct TableLines;

// y = clamp(round_shift(acc * mult[c], shift[c]) + zero[c], 0, last)
struct Requantization {
    const std::uint32_t* mult;
    const std::uint8_t* shift;
    const std::int32_t* zero;
    std::int32_t last;
    // The same for vectors of 8 channels, padded. Set by RequantizationConstants (ops/requantization.cpp).
    enum Form : std::uint8_t {
        ANY,        // use the parameters above
        HIGH_HALF,  // every shift is >= 32 and zero * 2^shift < 2^60: the result is in the high half of the product
        LIFTED,     // the same after accumulators are multiplied by 2^lift; these still fit in i32
    } form;
    const std::int32_t* vector_mult;
    const std::int64_t* vector_half;   // 2^(shift - 1) + zero * 2^shift + bias * mult; channel order 0 2 4 6 1 3 5 7
    const std::int32_t* vector_shift;  // shift - 32
    int lift;
};

// The second operand of a sum with an accumulator: (x - zero[c]) * 2^alpha[c] * mult[c].
struct Residual {
    const void* x;  // [rows, C]
    enum Type : std::uint8_t { U8, U16, I16 } type;
    const std::int32_t* zero;
    const std::int32_t* alpha;
    const std::int32_t* mult;
};

// The operation applied to a tile of accumulators while it is in the L1 cache.
struct Epilogue {
    enum Kind : std::uint8_t {
        ACC,     // y = acc + bias
        I32,     // y = round_shift((acc + bias) * mult, shift)
        CODES,   // y = clamp(round_shift((acc + bias) * mult, shift) + zero)
        LOOKUP,  // y = tables[starts[c] + code], where code is the y of CODES
        ADD,     // y = clamp(round_shift((acc + bias) * mult + residual, shift) + zero)
    } kind;
    bool wide;  // y is u16, else u8; ACC and I32: y is i32
    const std::int32_t* bias;
    Requantization requantization;
    const void* tables;          // LOOKUP: u8 or u16 entries
    const std::int32_t* starts;  // LOOKUP: first entry of the table of each channel
    const TableLines* lines;     // LOOKUP: the tables in another form (table_lines.h), or null
    Residual residual;
    bool low_half;   // ADD: every shift is <= 32 and the shifted sum fits in i32, so it is the low half of 64 bits
    bool high_half;  // ADD: every shift is >= 32 and the sum is below 2^62, so its high half has all bits of the result
};

// A tile of accumulators and its position in y.
struct Tile {
    const std::int32_t* acc;            // [rows][columns]
    int rows, columns;                  // columns: distance between rows in memory
    int valid_columns;                  // columns that exist in y
    std::int64_t row, channel, stride;  // first row and channel in y; stride: channels of y
};

// y[c] = clamp((t[c] * g[c] + b[c]) >> shift), where
//     t[c] = round(2^(fraction + j) * (C * v[c] - M1) / isqrt(2^(2 * j) * D))
//     v[c] = (x[c] - zero[c]) * 2^alpha[c], M1 = sum v, D = C * sum v^2 - M1^2 + epsilon
// and j is the largest integer with 2^(2 * j) * D < 2^62. Without centering, M1 = 0.
struct Norm {
    std::int64_t channels, epsilon;
    int shift, fraction;
    std::int64_t last;
    bool center, wide_in, wide_out;
    const std::int32_t* zero;
    const std::int32_t* alpha;
    const std::int32_t* g;
    const std::int64_t* b;  // b of the op * 2^b_shift + 2^(shift - 1)
    bool fits_i32;          // every C * v - M1 fits in i32, |t| < 2^30, shift >= 32 and fraction is 24
    bool per_tensor;      // fits_i32, all alpha are 0, C is a multiple of 16 and v is x minus the offset below, as i16
    std::int16_t offset;  // per_tensor: the zero point; with centering, any number, because it cancels
    // Set by QuickNorm (quick_norm.h), or null. In each group of 16 elements of quick_b, the even channels precede the
    // odd ones.
    const std::int32_t* quick_g;
    const std::int64_t* quick_b;
    int quick_shift;
};

// One row of a matrix product that is not fused: acc[n] += sum_k w[k] * (b[n, k] - zero), with b[k, n] if b_rows.
// Exact in i32 because the ops prove that the sum of all |w[k] * (b - zero)| is below 2^31.
struct RowProduct {
    const std::int32_t* w;
    std::int64_t inner, columns;  // K, N
    std::int64_t b_stride;        // elements between rows of b
    const void* b;                // u16 if wide, else u8
    bool wide, b_rows;
    std::int32_t zero;
};

struct AttentionBytes;  // kernels/attention_bytes.h

// One head of attention, all codes u8: scores = requantize(Q K^T + bias), softmax codes, y = requantize(weights V).
struct Attention {
    std::int64_t queries, tokens, width, value_width;     // M, T, D of Q and K, D of V
    std::int64_t q_stride, k_stride, v_stride, y_stride;  // bytes between tokens
    std::int32_t q_zero, k_zero, score_zero, score_last;
    std::int64_t score_mult;
    int score_shift;
    enum Kind : std::uint8_t {
        LOG,       // log_softmax: code = round(log2(sum / e))
        UNIFORM,   // softmax: code = round(e * round(mult / sum) / 2^shift)
        RELATIVE,  // row_codes: the code depends only on the distance to the largest score
    } kind;
    const std::int32_t* table;  // by distance to the largest score: exponentials e, or codes (RELATIVE)
    std::int64_t table_length;
    bool table_decreases;  // the exponentials never increase with the distance
    std::int64_t softmax_mult;
    int softmax_shift;
    std::int32_t softmax_last;
    const std::int16_t* weight;  // weight of each code, by which v - v_zero is multiplied
    std::int32_t sign;           // -1: weights are stored negated, because 2^15 does not fit in i16
    std::int32_t masked_code;    // code of tokens in another region
    // For vector code. code_by_distance: the code of each distance up to 255 (RELATIVE only). weight_low, weight_high:
    // the low and high bytes of the weights of 16 codes.
    const std::uint8_t* code_by_distance;
    const std::uint8_t* weight_low;
    const std::uint8_t* weight_high;
    const AttentionBytes* bytes;  // `table` and `weight`, padded to 256 entries, low and high bytes in separate arrays
    bool sixteen_codes;           // all codes are below 16
    std::int64_t largest_weight;  // over all codes; if > 0, each row is divided by the sum of its weights
    std::int32_t v_zero, y_zero, y_last;
    std::int64_t mult;
    int shift;
    bool same_keys;  // keys, values and scratch are those of the call before, so kernels need not pack them again
};

struct Kernels {
    const char* name;
    void (*epilogue)(const Epilogue&, const Tile&, void* y);
    void (*layernorm)(const Norm&, const void* x, void* y, std::int64_t rows);
    // If null, attention runs as separate ops. bias: i32 [M, T rounded up to 16] or null; region: u8 [T] or null,
    // with M = T.
    void (*attention)(const Attention&, const std::uint8_t* q, const std::uint8_t* k, const std::uint8_t* v,
                      const std::int32_t* bias, const std::uint8_t* region, std::uint8_t* y, std::uint8_t* scratch);
    // Scratch bytes of `attention`, or 0 if it does not support these parameters. Any smaller `queries`, `score_mult`
    // and `mult` are then supported with the same scratch.
    std::size_t (*attention_scratch)(const Attention&);
    void (*multiply_row)(const RowProduct&, std::int32_t* acc);
    const ElementwiseKernels* elementwise;
    bool groups_tables = false;  // the epilogue LOOKUP is faster if channels with the same table are adjacent
};

const Kernels* kernels_scalar();
const Kernels* kernels_avx2();
const Kernels* kernels_avx512();    // needs CpuFeatures::avx512_vnni and avx512_vbmi
const Kernels* kernels_avx512bw();  // needs CpuFeatures::avx512_vnni
const Kernels* kernels_neon();
const Kernels* kernels_neon_dotprod();
const Kernels* kernels_simd128();

}  // namespace fqvit
