// Softmax for attention_neon.cpp: turns a row of u8 scores into a row of weights, as low and high bytes.
//
// Scores are u8, so the distance from a score to the largest one is also u8, and every function of it is a table of
// bytes, looked up 16 tokens at a time. Exact because the tables hold the same integers as in the scalar ops;
// ops/attention.cpp proves that the sums fit.
#pragma once

#include <algorithm>

#include "core/fixed.h"
#include "kernels/attention_bytes.h"
#include "kernels/kernels.h"
#include "kernels/neon/neon.h"

namespace fqvit::neon {

// A row of scores. Tokens whose region differs from that of the query are not attended.
struct ScoreRow {
    const std::uint8_t* scores;  // [T rounded up to 16]
    std::int64_t tokens;
    const std::uint8_t* region;  // as `scores`, or null: all tokens are attended
    std::uint8_t query_region;

    // 0xff for the attended tokens among t .. t + 15.
    FQVIT_NEON_INLINE uint8x16_t attended(std::int64_t t) const {
        uint8x16_t found = vdupq_n_u8(0xff);
        if (region != nullptr) found = vceqq_u8(vld1q_u8(region + t), vdupq_n_u8(query_region));
        if (t + 16 > tokens) found = vandq_u8(found, exists(t));
        return found;
    }
    // 0xff for the tokens that exist.
    FQVIT_NEON_INLINE uint8x16_t exists(std::int64_t t) const {
        static constexpr std::uint8_t INDEX[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const std::int64_t count = std::min<std::int64_t>(16, tokens - t);
        return vcltq_u8(vld1q_u8(INDEX), vdupq_n_u8(static_cast<std::uint8_t>(count)));
    }
};

// The largest and the smallest attended score; 0 and 255 if there is none.
struct ScoreRange {
    std::uint8_t largest, smallest;
};

inline ScoreRange score_range(const ScoreRow& row) {
    uint8x16_t most = vdupq_n_u8(0), least = vdupq_n_u8(255);
    for (std::int64_t t = 0; t < row.tokens; t += 16) {
        const uint8x16_t x = vld1q_u8(row.scores + t), attended = row.attended(t);
        most = vmaxq_u8(most, vandq_u8(x, attended));
        least = vminq_u8(least, vornq_u8(x, attended));
    }
    return {vmaxvq_u8(most), vminvq_u8(least)};
}

FQVIT_NEON_INLINE std::uint32_t sum_of_bytes(uint8x16_t v) { return vaddlvq_u8(v); }

// Weights of one head by code: w + offset is in 0..65535 for every weight w, and is stored as two bytes.
struct WeightBytes {
    std::int64_t offset;
    // SIXTEEN: codes below 16, looked up in registers   SAME: every weight plus the offset equals its code
    enum Form : std::uint8_t { SIXTEEN, SAME, ANY } form;
    std::uint8_t low[256] = {}, high[256] = {};  // by code
    std::int64_t masked;                         // weight of tokens that are not attended, plus the offset

    // codes: the number of codes
    WeightBytes(const Attention& head, std::int64_t codes) : offset(0), form(codes <= 16 ? SIXTEEN : SAME) {
        const auto weight = [&](std::int64_t code) { return std::int64_t{head.weight[code]} * head.sign; };
        for (std::int64_t code = 0; code < codes; ++code) offset = std::max(offset, -weight(code));
        for (std::int64_t code = 0; code < codes; ++code) {
            const std::int64_t w = weight(code) + offset;
            low[code] = static_cast<std::uint8_t>(w & 255), high[code] = static_cast<std::uint8_t>(w >> 8);
            if (form != SIXTEEN && w != code) form = ANY;
        }
        masked = head.kind == Attention::RELATIVE ? offset : weight(head.masked_code) + offset;
    }
    bool has_high() const { return form != SAME; }
};

// Stores the weights of a row, whose codes are looked up by distance, and returns their sum.
// code_by_distance: 64 * blocks bytes
template <int blocks>
std::int64_t look_up_weights(const ScoreRow& row, std::uint8_t top, const std::uint8_t* code_by_distance,
                             const WeightBytes& weights, std::uint8_t* low, std::uint8_t* high) {
    const ByteTable<blocks> codes(code_by_distance);
    const uint8x16_t tops = vdupq_n_u8(top), limit = vdupq_n_u8(64 * blocks - 1);
    const uint8x16_t low_by_code = vld1q_u8(weights.low), high_by_code = vld1q_u8(weights.high);
    const uint8x16_t masked_low = vdupq_n_u8(static_cast<std::uint8_t>(weights.masked & 255));
    const uint8x16_t masked_high = vdupq_n_u8(static_cast<std::uint8_t>(weights.masked >> 8));
    uint32x4_t low_sum = vdupq_n_u32(0), high_sum = low_sum;
    for (std::int64_t t = 0; t < row.tokens; t += 16) {
        const uint8x16_t distance = vminq_u8(vsubq_u8(tops, vld1q_u8(row.scores + t)), limit);
        const uint8x16_t code = codes(distance);
        uint8x16_t lows = code, highs = vdupq_n_u8(0);
        if (weights.form == WeightBytes::SIXTEEN) {
            lows = vqtbl1q_u8(low_by_code, code), highs = vqtbl1q_u8(high_by_code, code);
        } else if (weights.form == WeightBytes::ANY) {
            std::uint8_t each[16], each_low[16], each_high[16];
            vst1q_u8(each, code);
            for (int i = 0; i < 16; ++i) each_low[i] = weights.low[each[i]], each_high[i] = weights.high[each[i]];
            lows = vld1q_u8(each_low), highs = vld1q_u8(each_high);
        }
        if (row.region != nullptr) {
            const uint8x16_t attended = row.attended(t);
            lows = vbslq_u8(attended, lows, masked_low), highs = vbslq_u8(attended, highs, masked_high);
        }
        if (t + 16 > row.tokens) lows = vandq_u8(lows, row.exists(t)), highs = vandq_u8(highs, row.exists(t));
        vst1q_u8(low + t, lows);
        low_sum = vpadalq_u16(low_sum, vpaddlq_u8(lows));
        if (!weights.has_high()) continue;
        vst1q_u8(high + t, highs);
        high_sum = vpadalq_u16(high_sum, vpaddlq_u8(highs));
    }
    return static_cast<std::int64_t>(vaddlvq_u32(low_sum) + 256 * vaddlvq_u32(high_sum));
}

// Returns the sum of table[distance] over the attended tokens. table: 64 * blocks bytes
template <int blocks>
std::int64_t look_up_sum(const ScoreRow& row, std::uint8_t top, const std::uint8_t* table) {
    const ByteTable<blocks> entries(table);
    const uint8x16_t tops = vdupq_n_u8(top), limit = vdupq_n_u8(64 * blocks - 1);
    uint32x4_t sum = vdupq_n_u32(0);
    for (std::int64_t t = 0; t < row.tokens; t += 16) {
        uint8x16_t found = entries(vminq_u8(vsubq_u8(tops, vld1q_u8(row.scores + t)), limit));
        if (row.region != nullptr || t + 16 > row.tokens) found = vandq_u8(found, row.attended(t));
        sum = vpadalq_u16(sum, vpaddlq_u8(found));
    }
    return static_cast<std::int64_t>(vaddlvq_u32(sum));
}

// Softmax of all rows of one head.
class Softmax {
public:
    explicit Softmax(const Attention& head)
        : head_(head),
          last_(std::min<std::int64_t>(head.table_length, 256) - 1),
          blocks_(static_cast<int>(last_ / 64 + 1)),
          weights_(head, number_of_codes(head)) {
        const auto entry = [&](std::int64_t distance) { return head.table[std::min(distance, last_)]; };
        if (head.kind == Attention::RELATIVE) {
            for (std::int64_t d = 0; d < 64 * blocks_; ++d) codes_[d] = static_cast<std::uint8_t>(entry(d));
            return;
        }
        std::int32_t largest = 0;
        for (std::int64_t d = 0; d < 64 * blocks_; ++d) {
            largest = std::max(largest, entry(d));
            for (int i = 0; i < 4; ++i) bytes_[i][d] = static_cast<std::uint8_t>(entry(d) >> 8 * i & 255);
        }
        while (bytes_of_table_ < 4 && largest >> 8 * bytes_of_table_ > 0) ++bytes_of_table_;
    }

    const WeightBytes& weights() const { return weights_; }

    // Writes the weights plus their offset and returns their sum.
    std::int64_t operator()(const ScoreRow& row, std::uint8_t* low, std::uint8_t* high) {
        const ScoreRange range = score_range(row);
        if (head_.kind != Attention::RELATIVE) {
            const std::int64_t farthest = std::min<std::int64_t>(range.largest - range.smallest, last_);
            const std::int64_t sum = sum_of_exponentials(row, range.largest);
            if (head_.kind == Attention::LOG) {
                find_log_codes(sum, farthest);
            } else {
                find_uniform_codes(sum, farthest);
            }
            // Distances beyond the end of the table get the code of its last entry.
            for (std::int64_t d = last_ + 1; farthest == last_ && d < 64 * blocks_; ++d) codes_[d] = codes_[last_];
        }
        static constexpr decltype(&look_up_weights<1>) BY_BLOCKS[] = {look_up_weights<1>, look_up_weights<2>,
                                                                      look_up_weights<3>, look_up_weights<4>};
        return BY_BLOCKS[blocks_ - 1](row, range.largest, codes_, weights_, low, high);
    }

private:
    static std::int64_t number_of_codes(const Attention& head) {
        if (head.kind != Attention::RELATIVE) return head.softmax_last + 1;
        std::int64_t largest = 0;
        for (std::int64_t d = 0; d < std::min<std::int64_t>(head.table_length, 256); ++d) {
            largest = std::max<std::int64_t>(largest, head.table[d]);
        }
        return largest + 1;
    }

    // Byte by byte: sum of e = sum over i of 256^i * (sum of byte i of e)
    std::int64_t sum_of_exponentials(const ScoreRow& row, std::uint8_t top) const {
        static constexpr decltype(&look_up_sum<1>) BY_BLOCKS[] = {look_up_sum<1>, look_up_sum<2>, look_up_sum<3>,
                                                                  look_up_sum<4>};
        std::int64_t sum = 0;
        for (int i = 0; i < bytes_of_table_; ++i) {
            sum += BY_BLOCKS[blocks_ - 1](row, top, bytes_[i]) * (std::int64_t{1} << 8 * i);
        }
        return sum;
    }

    // The code of q = floor((sum + e / 2) / e) is above c if and only if q >= 2 (for c = 0) or q >= 3 * 2^(c - 1) (for
    // c > 0). Multiplying by e avoids the division: x >= 2 * e or x >= 3 * e * 2^(c - 1), with x = sum + floor(e / 2).
    void find_log_codes(std::int64_t sum, std::int64_t farthest) {
        if (head_.bytes->is_supported) {
            for (std::int64_t d = 0; d <= farthest; d += 8) find_eight_log_codes(static_cast<std::uint32_t>(sum), d);
            return;
        }
        const std::int64_t last_code = head_.softmax_last;
        std::int64_t code = 0, ratio = 2;
        for (std::int64_t d = 0; d <= farthest; ++d) {
            const std::int64_t e = head_.table[d];
            if (!head_.table_decreases) code = 0, ratio = 2;
            while (code < last_code && (e == 0 || sum >= ratio * e - e / 2)) {
                ratio = code == 0 ? 3 : 2 * ratio;
                ++code;
            }
            codes_[d] = static_cast<std::uint8_t>(code);
        }
    }

    // AttentionBytes::is_supported means that x and 3 * e are below 2^31. `level` is floor(log2(x / (3 * e))), or
    // negative if x < 3 * e. Where e is 0, top_bit is -32, so that the level is 32 or more.
    FQVIT_NEON_INLINE uint16x4_t four_log_codes(uint32x4_t sum, std::int64_t d) const {
        const uint32x4_t e = vreinterpretq_u32_s32(vld1q_s32(head_.bytes->table + d));
        const uint32x4_t triple = vreinterpretq_u32_s32(vld1q_s32(head_.bytes->triple + d));
        const uint32x4_t x = vsraq_n_u32(sum, e, 1);
        const int32x4_t top_bit = vsubq_s32(vdupq_n_s32(31), vreinterpretq_s32_u32(vclzq_u32(x)));
        const int32x4_t difference = vsubq_s32(top_bit, vld1q_s32(head_.bytes->top_bit + d));
        const uint32x4_t below = vcltq_u32(x, vshlq_u32(triple, difference));
        const int32x4_t level = vaddq_s32(difference, vreinterpretq_s32_u32(below));
        const uint32x4_t first = vshrq_n_u32(vcgeq_u32(x, vshlq_n_u32(e, 1)), 31);
        const uint32x4_t more = vreinterpretq_u32_s32(vaddq_s32(level, vdupq_n_s32(2)));
        return vmovn_u32(vbslq_u32(vcgezq_s32(level), more, first));
    }

    FQVIT_NEON_INLINE void find_eight_log_codes(std::uint32_t sum, std::int64_t d) {
        const uint16x8_t codes =
            vcombine_u16(four_log_codes(vdupq_n_u32(sum), d), four_log_codes(vdupq_n_u32(sum), d + 4));
        vst1_u8(codes_ + d, vmin_u8(vmovn_u16(codes), vdup_n_u8(static_cast<std::uint8_t>(head_.softmax_last))));
    }

    void find_uniform_codes(std::int64_t sum, std::int64_t farthest) {
        const std::int64_t r = round_divide(head_.softmax_mult, sum);
        for (std::int64_t d = 0; d <= farthest; ++d) {
            codes_[d] = static_cast<std::uint8_t>(
                clamp(fqvit::round_shift(head_.table[d] * r, head_.softmax_shift), head_.softmax_last));
        }
    }

    const Attention& head_;
    std::int64_t last_;
    int blocks_, bytes_of_table_ = 0;
    WeightBytes weights_;
    std::uint8_t codes_[256] = {};  // by distance
    std::uint8_t bytes_[4][256];    // of the exponentials
};

}  // namespace fqvit::neon
