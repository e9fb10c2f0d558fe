// Softmax for attention_simd128.cpp: turns a row of u8 scores into a row of i16 weights.
//
// Scores are u8, so the distance from a score to the largest one is also u8, and every function of it is a table.
// Exact because the tables hold the same integers as in the scalar ops; ops/attention.cpp proves that the sums fit.
#pragma once

#include <algorithm>

#include "core/fixed.h"
#include "kernels/attention_bytes.h"
#include "kernels/kernels.h"
#include "kernels/wasm/simd128.h"

namespace fqvit::simd128 {

// A row of scores, followed by at least 16 bytes. Tokens whose region differs from that of the query are not attended.
struct ScoreRow {
    std::uint8_t* scores;
    std::int64_t tokens;
    const std::uint8_t* region;  // followed by 16 bytes, or null: all tokens are attended
    std::uint8_t query_region;

    // 0xff for the attended tokens among t .. t + 15.
    FQVIT_SIMD_INLINE v128_t attended(std::int64_t t) const {
        v128_t found = wasm_i8x16_const_splat(-1);
        if (region != nullptr) found = wasm_i8x16_eq(wasm_v128_load(region + t), wasm_u8x16_splat(query_region));
        if (t + 16 > tokens) {
            const v128_t index = wasm_i8x16_const(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            found = wasm_v128_and(found, wasm_i8x16_lt(index, wasm_i8x16_splat(static_cast<std::int8_t>(tokens - t))));
        }
        return found;
    }
    bool is_masked(std::int64_t t) const { return region != nullptr && region[t] != query_region; }

    // Sets the scores of unattended tokens to 0 and returns the largest score.
    std::uint8_t mask_and_maximum() const {
        v128_t top = wasm_i8x16_const_splat(0);
        for (std::int64_t t = 0; t < tokens; t += 16) {
            const v128_t x = wasm_v128_and(wasm_v128_load(scores + t), attended(t));
            wasm_v128_store(scores + t, x);
            top = wasm_u8x16_max(top, x);
        }
        std::uint8_t bytes[16];
        wasm_v128_store(bytes, top);
        return *std::max_element(bytes, bytes + 16);
    }
};

// Stores the weights of 16 codes below 16, as i16; 0 where a token is not attended. Returns their sum in 4 lanes.
FQVIT_SIMD_INLINE v128_t store_weights(const Attention& head, v128_t code, v128_t attended, std::int16_t* weights) {
    const v128_t low = wasm_v128_and(wasm_i8x16_swizzle(wasm_v128_load(head.weight_low), code), attended);
    const v128_t high = wasm_v128_and(wasm_i8x16_swizzle(wasm_v128_load(head.weight_high), code), attended);
    const v128_t a = wasm_i8x16_shuffle(low, high, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const v128_t b = wasm_i8x16_shuffle(low, high, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    wasm_v128_store(weights, a);
    wasm_v128_store(weights + 8, b);
    const v128_t ones = wasm_i16x8_const_splat(1);
    return wasm_i32x4_add(wasm_i32x4_dot_i16x8(a, ones), wasm_i32x4_dot_i16x8(b, ones));
}

FQVIT_SIMD_INLINE std::int64_t sum_of_i32(v128_t v) {
    return std::int64_t{wasm_i32x4_extract_lane(v, 0)} + wasm_i32x4_extract_lane(v, 1) + wasm_i32x4_extract_lane(v, 2) +
           wasm_i32x4_extract_lane(v, 3);
}

// RELATIVE with codes below 16: looks up the code of each distance in tables of 16 bytes; i8x16.swizzle gives 0 for
// indices past 15. Returns the sum of the weights.
inline std::int64_t relative_weights(const Attention& head, const ScoreRow& row, std::uint8_t top,
                                     std::int16_t* weights) {
    const std::int64_t length = std::min<std::int64_t>(head.table_length, 256);
    const int tables = static_cast<int>((length + 15) / 16);
    const v128_t last = wasm_u8x16_splat(static_cast<std::uint8_t>(length - 1)), tops = wasm_u8x16_splat(top);
    v128_t sum = wasm_i32x4_const_splat(0);
    for (std::int64_t t = 0; t < row.tokens; t += 16) {
        v128_t distance = wasm_u8x16_min(wasm_i8x16_sub(tops, wasm_v128_load(row.scores + t)), last);
        v128_t code = wasm_i8x16_const_splat(0);
        for (int i = 0; i < tables; ++i) {
            code = wasm_v128_or(code, wasm_i8x16_swizzle(wasm_v128_load(head.code_by_distance + 16 * i), distance));
            distance = wasm_i8x16_sub(distance, wasm_i8x16_const_splat(16));
        }
        sum = wasm_i32x4_add(sum, store_weights(head, code, row.attended(t), weights + t));
    }
    return sum_of_i32(sum);
}

// Returns the sum of the exponentials of a row in which mask_and_maximum() has set the masked scores to 0.
inline std::int64_t sum_exponentials(const Attention& head, const ScoreRow& row, std::uint8_t top) {
    const std::int32_t* by_score = head.bytes->reversed + 255 - top;
    std::int32_t even = 0, odd = 0;  // the sum is at most 2^30
    std::int64_t t = 0, masked = 0;
    for (; t + 2 <= row.tokens; t += 2) even += by_score[row.scores[t]], odd += by_score[row.scores[t + 1]];
    if (t < row.tokens) even += by_score[row.scores[t]];
    for (std::int64_t i = 0; row.region != nullptr && i < row.tokens; ++i) masked += row.is_masked(i) ? 1 : 0;
    return even + odd - masked * by_score[0];
}

// Whether log_weights supports the head.
inline bool has_log_weights(const Attention& head, const std::uint8_t* region) {
    return head.kind == Attention::LOG && head.bytes->is_supported && head.table_decreases && head.softmax_last < 16 &&
           (region == nullptr || head.weight[head.masked_code] == 0);
}

// LOG: the code of e is above c if and only if floor((sum + floor(e / 2)) / e) >= ratio, with ratio = 2 for c = 0, else
// 3 * 2^(c - 1). This means sum + floor(e / 2) >= ratio * e, which is equivalent to 2 * sum >= (2 * ratio - 1) * e: for
// even e directly, for odd e because the right side is odd and never equals 2 * sum. So the condition is
// e <= 2 * sum / (2 * ratio - 1). Because the exponentials decrease, this holds from some distance on for each c. The
// code of a token is the number of these distances that its own distance reaches.
inline void log_weights(const Attention& head, const ScoreRow& row, std::uint8_t top, std::int16_t* weights) {
    const auto twice = static_cast<std::uint32_t>(2 * sum_exponentials(head, row, top));
    v128_t reach[16];
    int codes = 0;
    for (std::int32_t d = 0; codes < head.softmax_last; ++codes) {
        const auto most =
            static_cast<std::int32_t>(twice / (codes == 0 ? 3u : (3u << codes) - 1u));  // at most 2^31 / 3
        while (d <= top && head.bytes->table[d] > most) ++d;
        if (d > top) break;
        reach[codes] = wasm_u8x16_splat(static_cast<std::uint8_t>(d));
    }
    const v128_t tops = wasm_u8x16_splat(top);
    for (std::int64_t t = 0; t < row.tokens; t += 16) {
        const v128_t distance = wasm_i8x16_sub(tops, wasm_v128_load(row.scores + t));
        v128_t code = wasm_i8x16_const_splat(0);
        for (int c = 0; c < codes; ++c) code = wasm_i8x16_sub(code, wasm_u8x16_ge(distance, reach[c]));
        store_weights(head, code, row.attended(t), weights + t);
    }
}

// Any kind: computes the weight of each distance, then looks up the weight of each token. Returns the sum of the
// weights, which only RELATIVE needs.
inline std::int64_t softmax_row(const Attention& head, const ScoreRow& row, std::uint8_t top, std::int16_t* weights) {
    const std::int64_t last = std::min<std::int64_t>(head.table_length, 256) - 1;
    std::int64_t sum = 0, farthest = 0;
    for (std::int64_t t = 0; t < row.tokens; ++t) {
        if (row.is_masked(t)) continue;
        const std::int64_t distance = std::min<std::int64_t>(top - row.scores[t], last);
        farthest = std::max(farthest, distance);
        sum += head.table[distance];
    }
    std::int16_t weight_by_distance[256];
    const std::int64_t last_code = head.softmax_last;
    const std::int64_t r = head.kind == Attention::UNIFORM ? round_divide(head.softmax_mult, sum) : 0;
    std::int64_t code = 0;
    for (std::int64_t d = 0; d <= farthest; ++d) {
        const std::int64_t e = head.table[d];
        if (head.kind == Attention::RELATIVE) {
            code = e;
        } else if (head.kind == Attention::UNIFORM) {
            code = clamp(round_shift(e * r, head.softmax_shift), last_code);
        } else {
            // As in log_weights, without the assumptions about the table.
            if (!head.table_decreases) code = 0;
            const auto exceeds = [&] {
                return e == 0 || sum >= (code == 0 ? 2 : std::int64_t{3} << (code - 1)) * e - e / 2;
            };
            while (code < last_code && exceeds()) ++code;
        }
        weight_by_distance[d] = head.weight[code];
    }
    // Tokens of other regions do not count in the sum of RELATIVE, whose masked weight is 0.
    const std::int16_t masked_weight =
        head.kind == Attention::RELATIVE ? std::int16_t{0} : head.weight[head.masked_code];
    std::int64_t total = 0;
    for (std::int64_t t = 0; t < row.tokens; ++t) {
        const std::int64_t distance = std::min<std::int64_t>(top - row.scores[t], last);
        weights[t] = row.is_masked(t) ? masked_weight : weight_by_distance[distance];
        total += weights[t];
    }
    weights[row.tokens] = 0;  // the second half of the last pair if the number of tokens is odd
    return total;
}

}  // namespace fqvit::simd128
