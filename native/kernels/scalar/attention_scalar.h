// The ops of attention as plain loops, one row of the output per call, with the formulas of src/fqvit/ir/attention.py.
//
// Exact because the ops prove, when they are loaded, that every accumulator fits in 31 bits and that every value before
// its shift fits in 63 bits. Tests also compile this file with -mgeneral-regs-only, which rejects floating-point code.
// A slice is one matrix of the last two axes, [T, T] or [T, D]; `row` numbers the rows of all slices.
#pragma once

#include <cstdint>

#include "core/codes.h"
#include "core/fixed.h"
#include "kernels/kernels.h"

namespace fqvit::scalar {

// Rows are multiplied in pieces of the reduction, so that scratch memory does not grow with the reduction's length.
constexpr std::int64_t PIECE = 4096;

// Returns the number of elements of the i32 scratch memory of matmul_row and weighted_sum_row.
inline std::int64_t row_scratch(std::int64_t inner, std::int64_t columns) {
    return (inner < PIECE ? inner : PIECE) + columns;
}

// Sets acc[n] = sum_k weight(k) * (b[n, k] - zero), with b[k, n] if b_rows, and returns acc. weight may have side
// effects: it is called once for each k, in order.
template <class Weight>
const std::int32_t* multiply_in_pieces(std::int64_t inner, std::int64_t columns, const Weight& weight, const Codes& b,
                                       std::int64_t b_first, bool b_rows, std::int64_t zero, const Kernels& kernels,
                                       std::int32_t* scratch) {
    std::int32_t *acc = scratch, *w = scratch + columns;
    for (std::int64_t n = 0; n < columns; ++n) acc[n] = 0;
    for (std::int64_t first = 0; first < inner; first += PIECE) {
        const std::int64_t count = inner - first < PIECE ? inner - first : PIECE;
        for (std::int64_t k = 0; k < count; ++k) w[k] = static_cast<std::int32_t>(weight(first + k));
        const void* piece = b.at(b_first + (b_rows ? first * columns : first));
        kernels.multiply_row(
            {w, count, columns, b_rows ? columns : inner, piece, b.wide, b_rows, static_cast<std::int32_t>(zero)}, acc);
    }
    return acc;
}

struct Product {
    std::int64_t rows, columns, inner;  // M, N, K of one slice
    std::int64_t a_zero, b_zero;
    bool b_rows;  // b is [K, N], else [N, K]
    std::int64_t mult;
    const std::int32_t* mults;  // [H], or null: all heads have `mult`
    int shift;
    std::int64_t zero, last;
    bool wide;
    const std::int32_t* bias;   // [R, H], a table of R values per head, or null
    const std::int32_t* index;  // [M, N], rows of this table
    std::int64_t heads;         // 0 if neither the bias nor the multiplier depends on the head
};

// y[m, n] = clamp(requantize(sum_k (a[m, k] - a_zero) * (b[n, k] - b_zero) + bias[index[m, n], h], mult[h]) + zero)
inline void matmul_row(const Product& p, const Codes& a, const Codes& b, void* y, std::int64_t row,
                       const Kernels& kernels, std::int32_t* scratch) {
    const std::int64_t slice = row / p.rows, m = row % p.rows, head = p.heads == 0 ? 0 : slice % p.heads;
    const std::int64_t mult = p.mults == nullptr ? p.mult : p.mults[head];
    const auto weight = [&](std::int64_t k) { return a[row * p.inner + k] - p.a_zero; };
    const std::int32_t* acc = multiply_in_pieces(p.inner, p.columns, weight, b, slice * p.columns * p.inner, p.b_rows,
                                                 p.b_zero, kernels, scratch);
    for (std::int64_t n = 0; n < p.columns; ++n) {
        std::int64_t sum = acc[n];
        if (p.bias != nullptr) sum += p.bias[p.index[m * p.columns + n] * p.heads + head];
        store_code(y, p.wide, row * p.columns + n, clamp(requantize(sum, mult, p.shift) + p.zero, p.last));
    }
}

struct SoftmaxRows {
    std::int64_t tokens;          // T, the length of a row
    std::int64_t rows_of_window;  // H * T; used only with `region`
    const std::uint8_t* region;   // [W, T] or null; tokens attend only to tokens of the same region
    const std::int32_t* table;    // indexed by the distance to the largest score of the row
    std::int64_t table_length;
};

// Calls attended(t, table entry) for every token t in the region of the row, and masked(t) for every other token.
template <class Attended, class Masked>
void for_each_token(const SoftmaxRows& rows, const Codes& x, std::int64_t row, Attended attended, Masked masked) {
    const std::int64_t first = row * rows.tokens, last = rows.table_length - 1;
    const std::uint8_t* region =
        rows.region == nullptr ? nullptr : rows.region + row / rows.rows_of_window * rows.tokens;
    const std::int64_t query = row % rows.tokens;
    const auto is_masked = [&](std::int64_t t) { return region != nullptr && region[t] != region[query]; };
    std::int64_t top = 0;
    for (std::int64_t t = 0; t < rows.tokens; ++t) {
        if (!is_masked(t) && x[first + t] > top) top = x[first + t];
    }
    for (std::int64_t t = 0; t < rows.tokens; ++t) {
        if (is_masked(t)) {
            masked(t);
        } else {
            const std::int64_t distance = top - x[first + t];
            attended(t, rows.table[distance < last ? distance : last]);
        }
    }
}

inline std::int64_t sum_of_exponentials(const SoftmaxRows& rows, const Codes& x, std::int64_t row) {
    std::int64_t sum = 0;
    for_each_token(rows, x, row, [&](std::int64_t, std::int64_t e) { sum += e; }, [](std::int64_t) {});
    return sum;
}

// min(round(log2(round(sum / e))), last)
inline std::int64_t log_code(std::int64_t e, std::int64_t sum, std::int64_t last) {
    if (e == 0) return last;
    const std::int64_t code = ilog2_round(static_cast<std::uint64_t>(round_divide(sum, e)));
    return code < last ? code : last;
}

inline void log_softmax_row(const SoftmaxRows& rows, const Codes& x, std::uint8_t* y, std::int64_t row,
                            std::int64_t last) {
    const std::int64_t sum = sum_of_exponentials(rows, x, row);
    std::uint8_t* out = y + row * rows.tokens;
    for_each_token(
        rows, x, row,
        [&](std::int64_t t, std::int64_t e) { out[t] = static_cast<std::uint8_t>(log_code(e, sum, last)); },
        [&](std::int64_t t) { out[t] = static_cast<std::uint8_t>(last); });
}

// y[t] = clamp(round_shift(e[t] * round(mult / sum), shift))
inline void softmax_row(const SoftmaxRows& rows, const Codes& x, void* y, bool wide, std::int64_t row,
                        std::int64_t mult, int shift, std::int64_t last) {
    const std::int64_t r = round_divide(mult, sum_of_exponentials(rows, x, row)), first = row * rows.tokens;
    for_each_token(
        rows, x, row,
        [&](std::int64_t t, std::int64_t e) { store_code(y, wide, first + t, clamp(round_shift(e * r, shift), last)); },
        [&](std::int64_t t) { store_code(y, wide, first + t, 0); });
}

// y[t] = table[distance]; the last entry if t is masked
inline void row_codes_row(const SoftmaxRows& rows, const Codes& x, std::uint8_t* y, std::int64_t row) {
    std::uint8_t* out = y + row * rows.tokens;
    for_each_token(
        rows, x, row, [&](std::int64_t t, std::int64_t code) { out[t] = static_cast<std::uint8_t>(code); },
        [&](std::int64_t t) { out[t] = static_cast<std::uint8_t>(rows.table[rows.table_length - 1]); });
}

struct WeightedSum {
    std::int64_t rows, inner, width;  // T rows of T weights each, D columns of V
    const std::int32_t* weight;       // by code
    std::int64_t largest_weight;      // > 0: divide each row by the sum of its weights
    std::int64_t v_zero, mult;
    int shift;
    std::int64_t zero, last;
    bool wide;
};

// shift_matmul and attend: y[d] = clamp(round_shift(M * sum_t w[t] * (v[t, d] - v_zero), shift) + zero), where w[t] is
// the weight of code a[t] and M = mult, or M = round(mult * largest_weight / sum_t w[t]) if largest_weight > 0.
inline void weighted_sum_row(const WeightedSum& p, const std::uint8_t* a, const Codes& v, void* y, std::int64_t row,
                             const Kernels& kernels, std::int32_t* scratch) {
    const std::uint8_t* codes = a + row * p.inner;
    std::int64_t sum = 0;
    const auto weight = [&](std::int64_t t) {
        sum += p.weight[codes[t]];
        return p.weight[codes[t]];
    };
    const std::int32_t* acc = multiply_in_pieces(p.inner, p.width, weight, v, row / p.rows * p.inner * p.width, true,
                                                 p.v_zero, kernels, scratch);
    const std::int64_t mult = p.largest_weight == 0 ? p.mult : round_divide(p.mult * p.largest_weight, sum);
    for (std::int64_t d = 0; d < p.width; ++d) {
        store_code(y, p.wide, row * p.width + d, clamp(round_shift(acc[d] * mult, p.shift) + p.zero, p.last));
    }
}

}  // namespace fqvit::scalar
