// What ops are made of: functions on plain pointers, one table of them an instruction set. kernels_scalar.cpp is the
// readable one and complete; the others replace what they do faster. No allocation, no exceptions, no floats.
//
// Constants of channels are arrays of C entries, whether the program gave one number or C.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fqvit {

// y = clamp(round_shift(acc * mult[c], shift[c]) + zero[c], 0, last), with what vector kernels need of it.
struct Rescale {
    // As in the program.
    const std::uint32_t* mult;
    const std::uint8_t* shift;
    const std::int32_t* zero;
    std::int32_t last;
    // For vectors, 8 channels at a time, padded; RescaleConstants in ops_dense.cpp makes them. `form` says which shifts
    // occur.
    enum Form : std::uint8_t { ANY, HIGH } form;
    const std::int32_t* vector_mult;
    const std::int64_t*
        vector_half;  // 2^(shift - 1) + zero 2^shift + bias mult, of channels 0 2 4 6, then 1 3 5 7 of every 8
    const std::int32_t* vector_shift;  // beyond 32
};

// The second operand of a sum with an accumulator: ((x - zero[c]) << alpha[c]) * mult[c].
struct Residual {
    const void* x;  // [rows, C]
    enum Type : std::uint8_t { U8, U16, I16 } type;
    const std::int32_t* zero;
    const std::int32_t* alpha;
    const std::int32_t* mult;
};

// What happens to a tile of accumulators.
struct Epilogue {
    enum Kind : std::uint8_t {
        ACC,     // y = acc + bias
        I32,     // y = round_shift((acc + bias) mult, shift)
        CODES,   // the rescale above
        LOOKUP,  // y = tables[starts[c] + code]
        ADD,     // y = clamp(round_shift((acc + bias) mult + residual, shift) + zero), all shifts in `rescale`
    } kind;
    bool wide;  // the output is u16, else u8 (ACC and I32: i32)
    const std::int32_t* bias;
    Rescale rescale;
    const void* tables;  // LOOKUP: u8 or u16, and where that of each channel starts
    const std::int32_t* starts;
    Residual residual;
    bool low;  // ADD: every shift is at most 32 and the shifted sum fits 32 bits
};

// Where a tile goes.
struct Tile {
    const std::int32_t* acc;            // [rows][columns]
    int rows, columns;                  // columns: of the tile in memory
    int taken;                          // columns that exist
    std::int64_t row, channel, stride;  // of its first element in y, and channels of y
};

struct Norm {
    std::int64_t channels, epsilon;
    int shift, b_shift;
    std::int64_t last;
    bool wide_in, wide_out;
    const std::int32_t* zero;
    const std::int32_t* alpha;
    const std::int32_t* g;
    const std::int64_t* b;  // b 2^b_shift + half
    bool narrow;            // every C v - M1 fits 32 bits, and shift is at least 32
    bool
        plain;  // and there is no alpha and one zero point, which makes no difference: v = x, less 2^15 where it is u16
};

// One head of attention: codes of Q, K, V -> codes of the context. All u8.
struct Attention {
    std::int64_t tokens, width;  // T, D
    std::int64_t q_stride, k_stride, v_stride, y_stride;
    std::int32_t q_zero, k_zero, score_zero, score_last;
    std::int64_t score_mult;
    int score_shift;
    enum Kind : std::uint8_t { LOG, UNIFORM, RELATIVE } kind;
    const std::int32_t* table;  // exponentials, or the code of each distance (RELATIVE)
    std::int64_t table_length;
    bool falling;  // the table of exponentials never rises
    std::int64_t softmax_mult;
    int softmax_shift;
    std::int32_t softmax_last;
    // weight[code], to be multiplied with v - v_zero. sign -1: they are stored negated, since 2^15 is no int16.
    const std::int16_t* weight;
    std::int32_t sign;
    std::int32_t codes;        // number of codes
    std::int32_t masked_code;  // of positions in other regions
    // RELATIVE, for vectors: the code of each distance up to 255, and the weights of 16 codes in two bytes.
    const std::uint8_t* by_distance;
    const std::uint8_t* weight_low;
    const std::uint8_t* weight_high;
    bool sixteen;          // there are no more codes than that
    std::int64_t largest;  // weight: > 0 where each row is divided by its sum
    std::int32_t v_zero, y_zero, y_last;
    std::int64_t mult;
    int shift;
};

struct Kernels {
    const char* name;
    void (*finish)(const Epilogue&, const Tile&, void* y);
    void (*normalize)(const Norm&, const void* x, void* y, std::int64_t rows);
    // null: attention runs op by op. bias: i32 [T, T up to a multiple of 16] or null; region: u8 [T] or null.
    void (*attend)(const Attention&, const std::uint8_t* q, const std::uint8_t* k, const std::uint8_t* v,
                   const std::int32_t* bias, const std::uint8_t* region, std::uint8_t* y, std::uint8_t* scratch);
    // Bytes of scratch for `attend`, or 0 where it cannot run such a head.
    std::size_t (*attend_scratch)(const Attention&);
};

const Kernels* kernels_scalar();
const Kernels* kernels_avx2();

}  // namespace fqvit
