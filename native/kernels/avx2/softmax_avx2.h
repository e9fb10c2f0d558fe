// Softmax for attention_avx2.cpp: turns a row of u8 scores into a row of i16 weights.
//
// Scores are u8, so the distance from a score to the largest one is also u8, and every function of it is a table.
// Exact because the tables hold the same integers as in the scalar ops; ops/attention.cpp proves that the sums fit.
#pragma once

#include <algorithm>
#include <bit>

#include "core/fixed.h"
#include "kernels/attention_bytes.h"
#include "kernels/avx2/avx2.h"
#include "kernels/kernels.h"

namespace fqvit::avx2 {

// Sets the scores of other regions to 0 and returns the largest score. Scores past the last token are already 0.
FQVIT_INLINE std::uint8_t mask_and_maximum(std::uint8_t* row, std::int64_t tokens, const std::uint8_t* region,
                                           std::uint8_t query_region) {
    __m256i top = _mm256_setzero_si256();
    const __m256i query_regions = _mm256_set1_epi8(static_cast<char>(query_region));
    for (std::int64_t t = 0; t < tokens; t += 32) {
        __m256i x = load(row + t);
        if (region != nullptr) {
            x = _mm256_and_si256(x, _mm256_cmpeq_epi8(load(region + t), query_regions));
            store(row + t, x);
        }
        top = _mm256_max_epu8(top, x);
    }
    return maximum(top);
}

// 32 tokens per vector: looks up the code of each distance in 16-entry tables in registers, then the weight of each
// code, also in registers if all codes are below 16. Tokens in other regions get the weight 0.
class CodeWeights {
public:
    FQVIT_AVX2 explicit CodeWeights(const Attention& head) : head_(head) {
        low_ = broadcast(head.weight_low), high_ = broadcast(head.weight_high);
        if (head.kind != Attention::RELATIVE) return;
        set_codes(head.code_by_distance, head.table_length);
        find_steps(head.code_by_distance);
    }

    // by_distance: the code of each distance. All distances from `length` on have the same code.
    FQVIT_AVX2 void set_codes(const std::uint8_t* by_distance, std::int64_t length) {
        length_ = std::min<std::int64_t>(length, 256);
        tables_ = static_cast<int>((length_ + 15) / 16);
        for (int i = 0; i < tables_; ++i) codes_[i] = broadcast(by_distance + 16 * i);
        steps_ = 0;
    }

    // Prepares look_up_steps if codes never decrease with the distance and increase so slowly that it beats look_up.
    FQVIT_AVX2 void find_steps(const std::uint8_t* by_distance) {
        constexpr int MAX_STEPS = 6;
        alignas(16) std::uint8_t first[16] = {}, before[MAX_STEPS][16];
        int steps = 1;
        for (std::int64_t block = 0; block < tables_; ++block) {
            const std::uint8_t* codes = by_distance + 16 * block;
            const auto size = std::min<std::int64_t>(16, length_ - 16 * block);
            if (!std::is_sorted(codes, codes + size) || codes[size - 1] - codes[0] > MAX_STEPS) return;
            first[block] = codes[0];
            steps = std::max(steps, codes[size - 1] - codes[0]);
            for (int step = 0; step < MAX_STEPS; ++step) {
                const auto* end = std::upper_bound(codes, codes + size, codes[0] + step);
                before[step][block] = static_cast<std::uint8_t>(end == codes + size ? 16 : end - codes - 1);
            }
        }
        if (4 + 3 * steps >= 4 * tables_) return;
        steps_ = steps;
        codes_[0] = broadcast(first);
        for (int step = 0; step < steps; ++step) codes_[1 + step] = broadcast(before[step]);
    }

    // Returns the sum of the stored weights.
    FQVIT_AVX2 std::int64_t operator()(const std::uint8_t* row, std::uint8_t top, const std::uint8_t* region,
                                       std::uint8_t query_region, std::int16_t* weights) const {
        const std::int64_t tokens = head_.tokens;
        const __m256i tops = _mm256_set1_epi8(static_cast<char>(top));
        const __m256i last = _mm256_set1_epi8(static_cast<char>(length_ - 1));
        const __m256i query_regions = _mm256_set1_epi8(static_cast<char>(query_region)), ones = _mm256_set1_epi16(1);
        __m256i sum = _mm256_setzero_si256();
        for (std::int64_t t = 0; t < tokens; t += 32) {
            const __m256i distance = _mm256_min_epu8(_mm256_sub_epi8(tops, load(row + t)), last);
            const __m256i code = steps_ > 0 ? look_up_steps(distance) : look_up(distance);
            __m256i attended = _mm256_set1_epi8(-1);
            if (region != nullptr) attended = _mm256_cmpeq_epi8(load(region + t), query_regions);
            if (t + 32 > tokens) attended = _mm256_and_si256(attended, first_bytes(tokens - t));
            if (head_.sixteen_codes) {
                const __m256i low = _mm256_and_si256(_mm256_shuffle_epi8(low_, code), attended);
                const __m256i high = _mm256_and_si256(_mm256_shuffle_epi8(high_, code), attended);
                const __m256i a = _mm256_unpacklo_epi8(low, high), b = _mm256_unpackhi_epi8(low, high);
                store(weights + t, _mm256_permute2x128_si256(a, b, 0x20));
                store(weights + t + 16, _mm256_permute2x128_si256(a, b, 0x31));
            } else {
                alignas(32) std::uint8_t codes[32], is_attended[32];
                store(codes, code), store(is_attended, attended);
                for (int i = 0; i < 32; ++i)
                    weights[t + i] = is_attended[i] != 0 ? head_.weight[codes[i]] : std::int16_t{0};
            }
            sum = _mm256_add_epi32(sum, _mm256_add_epi32(_mm256_madd_epi16(load(weights + t), ones),
                                                         _mm256_madd_epi16(load(weights + t + 16), ones)));
        }
        alignas(32) std::int32_t parts[8];
        store(parts, sum);
        std::int64_t total = 0;
        for (const std::int32_t part : parts) total += part;
        return total;
    }

private:
    FQVIT_INLINE static __m256i broadcast(const std::uint8_t* p) {
        return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }

    // 0xff in the first `count` bytes.
    FQVIT_INLINE static __m256i first_bytes(std::int64_t count) {
        alignas(32) static constexpr std::uint8_t indices[32] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10,
                                                                 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
                                                                 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
        return _mm256_cmpgt_epi8(_mm256_set1_epi8(static_cast<char>(count)), load(indices));
    }

    // Table i holds distances 16 * i .. 16 * i + 15. vpshufb returns 0 if bit 7 of the index is set, and a saturating
    // addition of 0x70 sets bit 7 of every index above 15.
    FQVIT_INLINE __m256i look_up(__m256i distance) const {
        const __m256i sixteen = _mm256_set1_epi8(16), bit_7_past_15 = _mm256_set1_epi8(0x70);
        __m256i code = _mm256_shuffle_epi8(codes_[0], _mm256_adds_epu8(distance, bit_7_past_15));
        for (int i = 1; i < tables_; ++i) {
            distance = _mm256_sub_epi8(distance, sixteen);
            code = _mm256_or_si256(code, _mm256_shuffle_epi8(codes_[i], _mm256_adds_epu8(distance, bit_7_past_15)));
        }
        return code;
    }

    // The code of distance 16 * i + j is the first code of block i plus the number of steps before position j.
    FQVIT_INLINE __m256i look_up_steps(__m256i distance) const {
        const __m256i low_bits = _mm256_set1_epi8(15);
        const __m256i block = _mm256_and_si256(_mm256_srli_epi16(distance, 4), low_bits);
        const __m256i within = _mm256_and_si256(distance, low_bits);
        __m256i code = _mm256_shuffle_epi8(codes_[0], block);
        for (int i = 1; i <= steps_; ++i) {
            code = _mm256_sub_epi8(code, _mm256_cmpgt_epi8(within, _mm256_shuffle_epi8(codes_[i], block)));
        }
        return code;
    }

    const Attention& head_;
    std::int64_t length_ = 1;
    int tables_ = 0, steps_ = 0;
    __m256i codes_[16], low_, high_;
};

// Returns the sum of the exponentials of a row in which the scores of other regions have been set to 0.
FQVIT_AVX2 std::int64_t sum_exponentials(const Attention& head, const std::uint8_t* row, std::uint8_t top,
                                         const std::uint8_t* region, std::uint8_t query_region) {
    const std::int32_t* by_score = head.bytes->reversed + 255 - top;
    std::int32_t even = 0, odd = 0;  // the sum is at most 2^30
    std::int64_t t = 0;
    for (; t + 4 <= head.tokens; t += 4) {
        even += by_score[row[t]], odd += by_score[row[t + 1]];
        even += by_score[row[t + 2]], odd += by_score[row[t + 3]];
    }
    for (; t < head.tokens; ++t) even += by_score[row[t]];
    std::int64_t masked = 0;
    for (std::int64_t i = 0; region != nullptr && i < head.tokens; ++i) masked += region[i] != query_region ? 1 : 0;
    return even + odd - masked * by_score[0];
}

// a > b, unsigned
FQVIT_INLINE __m256i greater_u32(__m256i a, __m256i b) {
    return _mm256_xor_si256(_mm256_cmpeq_epi32(_mm256_min_epu32(a, b), a), _mm256_set1_epi32(-1));
}

// LOG: sets the codes of the first `distances` distances. The code of e > 0 is 0 if 2 * sum < 3 * e,
// else 1 + floor(log2((2 * sum + e) / (3 * e))). This is equivalent to the conditions in softmax_row. sum <= 2^30, so
// 2 * sum + e fits in u32. e = 0 gives a large code because of its top_bit.
FQVIT_AVX2 void log_codes(const Attention& head, std::int64_t sum, std::int64_t distances, std::uint8_t* by_distance) {
    const AttentionBytes& bytes = *head.bytes;
    const auto twice = static_cast<std::uint32_t>(2 * sum);
    const int top_bit = std::bit_width(twice) - 1;
    const __m256i twice_sum = _mm256_set1_epi32(static_cast<int>(twice)), top_bits = _mm256_set1_epi32(top_bit);
    // All numbers with a higher most significant bit are above this one.
    const __m256i limit = _mm256_set1_epi32(static_cast<int>(0xffffffffu >> (31 - top_bit)));
    const __m256i last = _mm256_set1_epi8(static_cast<char>(head.softmax_last)), one = _mm256_set1_epi32(1);
    for (std::int64_t d = 0; d < distances; d += 32) {
        __m256i codes[4];
        for (int i = 0; i < 4; ++i) {
            const std::int64_t at = d + 8 * i;
            const __m256i triple = load(bytes.triple + at), total = _mm256_add_epi32(twice_sum, load(bytes.table + at));
            __m256i code = _mm256_sub_epi32(top_bits, load(bytes.top_bit + at));
            code = _mm256_sub_epi32(code, greater_u32(total, limit));
            const __m256i too_large = greater_u32(_mm256_sllv_epi32(triple, code), total);
            code = _mm256_add_epi32(_mm256_add_epi32(code, one), too_large);
            codes[i] = _mm256_andnot_si256(greater_u32(triple, twice_sum), code);
        }
        const __m256i words =
            _mm256_packus_epi16(_mm256_packs_epi32(codes[0], codes[1]), _mm256_packs_epi32(codes[2], codes[3]));
        const __m256i ordered = _mm256_permutevar8x32_epi32(words, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        store(by_distance + d, _mm256_min_epu8(ordered, last));
    }
}

// Whether log_codes and CodeWeights support the head. If not, softmax_row computes the weights of a row.
inline bool has_vector_softmax(const Attention& head, const std::uint8_t* region) {
    return head.kind == Attention::LOG && head.bytes->is_supported &&
           (region == nullptr || head.weight[head.masked_code] == 0);
}

// LOG and UNIFORM: sums the exponentials of the row, computes the weight of each distance, then looks up the
// weight of each token.
FQVIT_AVX2 void softmax_row(const Attention& head, const std::uint8_t* row, std::uint8_t top,
                            const std::uint8_t* region, std::uint8_t query_region, std::int16_t* weights) {
    const std::int64_t last = std::min<std::int64_t>(head.table_length, 256) - 1;
    std::int64_t sum = 0, farthest = 0;
    for (std::int64_t t = 0; t < head.tokens; ++t) {
        if (region != nullptr && region[t] != query_region) continue;
        const std::int64_t distance = std::min<std::int64_t>(top - row[t], last);
        farthest = std::max(farthest, distance);
        sum += head.table[distance];
    }
    std::int16_t weight_by_distance[256];
    if (head.kind == Attention::LOG) {
        const std::int64_t last_code = head.softmax_last;
        std::int64_t code = 0;
        for (std::int64_t d = 0; d <= farthest; ++d) {
            const std::int64_t e = head.table[d];
            // The code of q = floor((sum + e / 2) / e) is above c if and only if q >= 2 (for c = 0) or
            // q >= 3 * 2^(c - 1) (for c > 0). Multiplying both sides by e avoids the division.
            if (!head.table_decreases) code = 0;
            const auto exceeds = [&] {
                return e == 0 || sum >= (code == 0 ? 2 : std::int64_t{3} << (code - 1)) * e - e / 2;
            };
            while (code < last_code && exceeds()) ++code;
            weight_by_distance[d] = head.weight[code];
        }
    } else {
        const std::int64_t r = round_divide(head.softmax_mult, sum);
        for (std::int64_t d = 0; d <= farthest; ++d) {
            weight_by_distance[d] =
                head.weight[clamp(round_shift(head.table[d] * r, head.softmax_shift), head.softmax_last)];
        }
    }
    const std::int16_t masked_weight = head.weight[head.masked_code];
    for (std::int64_t t = 0; t < head.tokens; ++t) {
        const bool masked = region != nullptr && region[t] != query_region;
        weights[t] = masked ? masked_weight : weight_by_distance[std::min<std::int64_t>(top - row[t], last)];
    }
    if (head.tokens % 2 != 0) weights[head.tokens] = 0;
}

}  // namespace fqvit::avx2
