// The ops of attention one by one, as in src/fqvit/ir/attention.py: plain loops, no floats (-mgeneral-regs-only
// compiles them). Each function computes rows begin..end of its output; `slice` below is one [.., T, T] or [.., T, D]
// matrix.
#pragma once

#include <cstdint>

#include "core/fixed.h"

namespace fqvit::scalar {

// Codes of either width.
struct Codes {
    const void* data;
    bool wide;
    std::int64_t operator[](std::int64_t i) const {
        return wide ? static_cast<const std::uint16_t*>(data)[i] : static_cast<const std::uint8_t*>(data)[i];
    }
};

inline void put(void* y, bool wide, std::int64_t i, std::int64_t code) {
    if (wide) {
        static_cast<std::uint16_t*>(y)[i] = static_cast<std::uint16_t>(code);
    } else {
        static_cast<std::uint8_t*>(y)[i] = static_cast<std::uint8_t>(code);
    }
}

struct Product {
    std::int64_t rows, columns, inner;  // M, N, K of one slice
    std::int64_t a_zero, b_zero;
    bool b_rows;  // b is [K, N], else [N, K]
    std::int64_t mult;
    int shift;
    std::int64_t zero, last;
    bool wide;
    const std::int32_t* bias;    // [R, H] or null
    const std::uint16_t* index;  // [M, N]
    std::int64_t heads;
};

// y[m, n] = clamp(requantize(sum_k (a - a_zero)(b - b_zero) + bias[index[m, n], h]) + zero); `row` counts over all
// slices.
inline void matmul_row(const Product& p, const Codes& a, const Codes& b, void* y, std::int64_t row) {
    const std::int64_t slice = row / p.rows, m = row % p.rows, head = p.heads == 0 ? 0 : slice % p.heads;
    const std::int64_t b_first = slice * p.columns * p.inner;
    for (std::int64_t n = 0; n < p.columns; ++n) {
        std::int64_t acc = 0;
        for (std::int64_t k = 0; k < p.inner; ++k) {
            acc += (a[row * p.inner + k] - p.a_zero) *
                   (b[b_first + (p.b_rows ? k * p.columns + n : n * p.inner + k)] - p.b_zero);
        }
        if (p.bias != nullptr) acc += p.bias[p.index[m * p.columns + n] * p.heads + head];
        put(y, p.wide, row * p.columns + n, clamp(requantize(acc, p.mult, p.shift) + p.zero, p.last));
    }
}

struct Rows {
    std::int64_t tokens;         // T, the length of a row
    std::int64_t windows_rows;   // rows of one window: H T; where there are regions
    const std::uint8_t* region;  // [W, T] or null
    const std::int32_t* table;
    std::int64_t table_length;
};

// Calls each(t, entry of the table) for a row; where two tokens lie in different regions: other(t).
template <class Each, class Other>
void by_distance(const Rows& rows, const Codes& x, std::int64_t row, Each each, Other other) {
    const std::int64_t first = row * rows.tokens, last = rows.table_length - 1;
    const std::uint8_t* region = rows.region == nullptr ? nullptr : rows.region + row / rows.windows_rows * rows.tokens;
    const std::int64_t own = row % rows.tokens;
    const auto apart = [&](std::int64_t t) { return region != nullptr && region[t] != region[own]; };
    std::int64_t top = 0;
    for (std::int64_t t = 0; t < rows.tokens; ++t) {
        if (!apart(t) && x[first + t] > top) top = x[first + t];
    }
    for (std::int64_t t = 0; t < rows.tokens; ++t) {
        if (apart(t)) {
            other(t);
        } else {
            const std::int64_t distance = top - x[first + t];
            each(t, rows.table[distance < last ? distance : last]);
        }
    }
}

inline std::int64_t row_sum(const Rows& rows, const Codes& x, std::int64_t row) {
    std::int64_t sum = 0;
    by_distance(rows, x, row, [&](std::int64_t, std::int64_t e) { sum += e; }, [](std::int64_t) {});
    return sum;
}

inline std::int64_t log_code(std::int64_t e, std::int64_t sum, std::int64_t last) {
    if (e == 0) return last;
    const std::int64_t code = ilog2_round(static_cast<std::uint64_t>(round_divide(sum, e)));
    return code < last ? code : last;
}

inline void log_softmax_row(const Rows& rows, const Codes& x, std::uint8_t* y, std::int64_t row, std::int64_t last) {
    const std::int64_t sum = row_sum(rows, x, row);
    std::uint8_t* out = y + row * rows.tokens;
    by_distance(
        rows, x, row,
        [&](std::int64_t t, std::int64_t e) { out[t] = static_cast<std::uint8_t>(log_code(e, sum, last)); },
        [&](std::int64_t t) { out[t] = static_cast<std::uint8_t>(last); });
}

inline void softmax_row(const Rows& rows, const Codes& x, void* y, bool wide, std::int64_t row, std::int64_t mult,
                        int shift, std::int64_t last) {
    const std::int64_t r = round_divide(mult, row_sum(rows, x, row)), first = row * rows.tokens;
    by_distance(
        rows, x, row,
        [&](std::int64_t t, std::int64_t e) { put(y, wide, first + t, clamp(round_shift(e * r, shift), last)); },
        [&](std::int64_t t) { put(y, wide, first + t, clamp(round_shift(0, shift), last)); });
}

inline void row_codes_row(const Rows& rows, const Codes& x, std::uint8_t* y, std::int64_t row) {
    std::uint8_t* out = y + row * rows.tokens;
    by_distance(
        rows, x, row, [&](std::int64_t t, std::int64_t code) { out[t] = static_cast<std::uint8_t>(code); },
        [&](std::int64_t t) { out[t] = static_cast<std::uint8_t>(rows.table[rows.table_length - 1]); });
}

struct Context {
    std::int64_t rows, inner, width;  // T rows of T weights each, D columns of V
    const std::int32_t* weight;       // of each code
    std::int64_t largest;             // 0: no division by the row's sum
    std::int64_t v_zero, mult;
    int shift;
    std::int64_t zero, last;
    bool wide;
};

// shift_matmul and attend: y[d] = clamp(round_shift(sum_t w[t] (v[t, d] - v_zero) M, shift) + zero), M = mult or, with
// `largest`, round(mult largest / sum w).
inline void context_row(const Context& c, const std::uint8_t* a, const Codes& v, void* y, std::int64_t row) {
    const std::int64_t slice = row / c.rows;
    const std::uint8_t* codes = a + row * c.inner;
    std::int64_t sum = 0;
    for (std::int64_t t = 0; t < c.inner; ++t) sum += c.weight[codes[t]];
    const std::int64_t mult = c.largest == 0 ? c.mult : round_divide(c.mult * c.largest, sum);
    for (std::int64_t d = 0; d < c.width; ++d) {
        std::int64_t acc = 0;
        for (std::int64_t t = 0; t < c.inner; ++t)
            acc += c.weight[codes[t]] * (v[(slice * c.inner + t) * c.width + d] - c.v_zero);
        put(y, c.wide, row * c.width + d, clamp(round_shift(acc * mult, c.shift) + c.zero, c.last));
    }
}

}  // namespace fqvit::scalar
