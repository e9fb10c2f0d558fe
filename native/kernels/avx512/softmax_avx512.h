// Softmax for attention_avx512.cpp: turns a row of u8 scores into the bytes of its weights.
//
// Scores are u8, so the distance from a score to the largest one is also u8, and every function of it is a table of at
// most 256 bytes, which permutations look up in registers. Exact because the tables hold the same integers as in
// the scalar ops; ops/attention.cpp proves that the sums fit.
#pragma once

#include <algorithm>
#include <bit>

#include "core/fixed.h"
#include "kernels/attention_bytes.h"
#include "kernels/avx512/avx512.h"
#include "kernels/kernels.h"

namespace fqvit::FQVIT_AVX512_NAMESPACE {

// 4 x 16 x i32 -> 64 x u8, saturated.
FQVIT_INLINE Vector narrow(Vector a, Vector b, Vector c, Vector d) {
    alignas(64) static constexpr std::int32_t ORDER[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    return permute_i32(load(ORDER), pack_i16_as_u8(pack_i32_as_i16(a, b), pack_i32_as_i16(c, d)));
}

// The weights of a row minus the smallest weight are stored as high * 2^split + low. sum: the sum of these differences.
// low_blocks: bit i is set if a low byte of tokens 64 * i .. 64 * i + 63 is not 0. high_blocks: the same for high
// bytes.
struct RowWeights {
    std::int32_t split, sum;
    std::uint64_t low_blocks, high_blocks;
};

class Softmax {
public:
    FQVIT_AVX512 explicit Softmax(const Attention& head)
        : head_(head),
          bytes_(*head.bytes),
          length_(head.table_length < 256 ? head.table_length : 256),
          last_(set_i8(static_cast<std::int32_t>(length_ - 1))) {}

    // Subtracts the smallest weight from the weights, replaces the scores in `low` by the low bytes of the differences,
    // and writes their high bytes to `high`. Bytes up to the next multiple of 64 tokens become 0.
    FQVIT_INLINE RowWeights operator()(std::uint8_t* low, std::uint8_t* high, const std::uint8_t* region,
                                       std::int64_t query) const {
        const Attended attended{head_.tokens, region, set_i8(region == nullptr ? 0 : region[query])};
        std::uint8_t top;
        std::int32_t split = bytes_.split;
        const std::uint8_t *low_bytes = bytes_.weight_low, *high_bytes = bytes_.weight_high;
        alignas(64) std::uint8_t by_distance[2][256];
        if (head_.kind == Attention::RELATIVE) {
            Vector tops = zero();
            for (std::int64_t t = 0; t < head_.tokens; t += 64) tops = max_u8(tops, load_i8(low + t, attended(t)));
            top = largest_u8(tops);
        } else {
            const Range range = find_range(low, attended);
            top = range.top;
            low_bytes = by_distance[0], high_bytes = by_distance[1];
            const std::uint32_t sum = sum_exponentials(low, attended, top);
            const std::int64_t distances = range.farthest < length_ ? range.farthest + 1 : length_;
            if (head_.kind == Attention::LOG) {
                // If exponentials never increase, no code of the row is below that of distance 0.
                if (head_.table_decreases) split = bytes_.split_by_code[log_code(sum, bytes_.table[0])];
                log_weights(sum, distances, split, by_distance);
            } else {
                uniform_weights(sum, distances, by_distance);
            }
        }
        return look_up_weights(low, high, attended, top, split, low_bytes, high_bytes);
    }

private:
    // The tokens t .. t + 63 that exist and are in the region of the query, as a mask.
    struct Attended {
        std::int64_t tokens;
        const std::uint8_t* region;
        Vector query_region;

        FQVIT_INLINE std::uint64_t operator()(std::int64_t t) const {
            const std::uint64_t valid = first_64(tokens - t);
            return region == nullptr ? valid : valid & equal_i8(load_i8(region + t, valid), query_region);
        }
    };

    // The largest score and the distance of the smallest one from it.
    struct Range {
        std::uint8_t top;
        std::int64_t farthest;
    };
    FQVIT_AVX512 static Range find_range(const std::uint8_t* row, const Attended& attended) {
        const Vector ones = set_i8(-1);
        Vector tops = zero(), bottoms = zero();  // bottoms: 255 minus the smallest score
        for (std::int64_t t = 0; t < attended.tokens; t += 64) {
            const std::uint64_t mask = attended(t);
            const Vector x = load_i8(row + t, mask);
            tops = max_u8(tops, x);
            bottoms = max_u8(bottoms, select_i8(mask, zero(), xor_bits(x, ones)));
        }
        const std::uint8_t top = largest_u8(tops);
        return {top, top - (255 - largest_u8(bottoms))};
    }

    FQVIT_INLINE Vector distance(const std::uint8_t* row, std::uint64_t mask, Vector tops) const {
        return min_u8(sub_i8(tops, load_i8(row, mask)), last_);
    }

    FQVIT_INLINE RowWeights look_up_weights(std::uint8_t* low, std::uint8_t* high, const Attended& attended,
                                            std::uint8_t top, std::int32_t split, const std::uint8_t* low_bytes,
                                            const std::uint8_t* high_bytes) const {
        const ByteTable low_table(low_bytes, length_), high_table(high_bytes, length_);
        const Vector tops = set_i8(top), ones = set_i8(1);
        Vector low_sum = zero(), high_sum = zero(), masked_low = zero(), masked_high = zero();
        const std::int32_t masked = attended.region == nullptr ? 0 : bytes_.masked_weight;
        if (masked != 0) masked_high = set_i8(masked >> split), masked_low = set_i8(masked & ((1 << split) - 1));
        RowWeights found{split, 0, 0, 0};
        for (std::int64_t t = 0; t < head_.tokens; t += 64) {
            const std::uint64_t mask = attended(t);
            const Vector d = distance(low + t, mask, tops);
            Vector a = select_i8(mask, masked_high, high_table[d]);
            if (masked != 0) a = select_i8(first_64(head_.tokens - t), zero(), a);
            store(high + t, a);
            high_sum = dpbusd(high_sum, a, ones);
            found.high_blocks |= std::uint64_t{nonzero_i8(a) != 0} << (t / 64);
            if (split == 0) {  // other rows may have low bytes, so this row needs zeros
                store(low + t, zero());
                continue;
            }
            Vector b = select_i8(mask, masked_low, low_table[d]);
            if (masked != 0) b = select_i8(first_64(head_.tokens - t), zero(), b);
            store(low + t, b);
            low_sum = dpbusd(low_sum, b, ones);
            found.low_blocks |= std::uint64_t{nonzero_i8(b) != 0} << (t / 64);
        }
        found.sum = sum_i32(add_i32(low_sum, shl_each_i32(high_sum, set_i32(split))));
        return found;
    }

    // Looks up the three bytes of each exponential. Sums of bytes fit in i32 for 4096 tokens.
    FQVIT_AVX512 std::uint32_t sum_exponentials(const std::uint8_t* row, const Attended& attended,
                                                std::uint8_t top) const {
        const ByteTable low(bytes_.exponential[0], length_), middle(bytes_.exponential[1], length_),
            high(bytes_.exponential[2], length_);
        const Vector tops = set_i8(top), ones = set_i8(1);
        Vector low_sum = zero(), middle_sum = zero(), high_sum = zero();
        for (std::int64_t t = 0; t < head_.tokens; t += 64) {
            const std::uint64_t mask = attended(t);
            const Vector d = distance(row + t, mask, tops), counted = select_i8(mask, zero(), ones);
            low_sum = dpbusd(low_sum, low[d], counted);
            middle_sum = dpbusd(middle_sum, middle[d], counted);
            high_sum = dpbusd(high_sum, high[d], counted);
        }
        return static_cast<std::uint32_t>(
            sum_i32(add_i32(add_i32(low_sum, shl_i32(middle_sum, 8)), shl_i32(high_sum, 16))));
    }

    // The code of an exponential e > 0 is above 0 if and only if 2 * sum >= 3 * e, and above c > 0 if and only if
    // 2 * sum >= (3 * 2^c - 1) * e, that is, 3 * e * 2^c <= 2 * sum + e. So the code is either 0 or
    // 1 + floor(log2((2 * sum + e) / (3 * e))). sum <= 2^30 and e <= sum, so 2 * sum + e fits in u32. e = 0 gives a
    // large code because of its top_bit.
    FQVIT_AVX512 void log_weights(std::uint32_t sum, std::int64_t distances, std::int32_t split,
                                  std::uint8_t (&by_distance)[2][256]) const {
        const std::int32_t top_bit = std::bit_width(2 * sum) - 1;
        const Vector twice_sum = set_i32(static_cast<std::int32_t>(2 * sum)), top_bits = set_i32(top_bit);
        // All numbers with a higher most significant bit are above this one.
        const Vector limit = set_i32(static_cast<std::int32_t>(0xffffffffu >> (31 - top_bit)));
        const Vector last = set_i8(head_.softmax_last);
        for (std::int64_t d = 0; d < distances; d += 64) {
            const Vector first = log_codes(d, twice_sum, top_bits, limit);
            const Vector second = log_codes(d + 16, twice_sum, top_bits, limit);
            const Vector third = log_codes(d + 32, twice_sum, top_bits, limit);
            const Vector fourth = log_codes(d + 48, twice_sum, top_bits, limit);
            const Vector code = min_u8(narrow(first, second, third, fourth), last);
            store(by_distance[0] + d, look_up_64(code, bytes_.log_low[split]));
            store(by_distance[1] + d, look_up_64(code, bytes_.log_high[split]));
        }
    }

    // Returns the code of one exponential e > 0, with the same formula.
    std::int32_t log_code(std::uint32_t sum, std::int32_t e) const {
        const std::uint32_t triple = 3 * static_cast<std::uint32_t>(e), total = 2 * sum + static_cast<std::uint32_t>(e);
        if (2 * sum < triple) return 0;
        const int code = std::bit_width(total) - std::bit_width(triple);
        return std::min(code + (triple << code > total ? 0 : 1), head_.softmax_last);
    }

    FQVIT_INLINE Vector log_codes(std::int64_t at, Vector twice_sum, Vector top_bits, Vector limit) const {
        const Vector one = set_i32(1), triple = load(bytes_.triple + at);
        const Vector total = add_i32(twice_sum, load(bytes_.table + at));
        // floor(log2(total)) - floor(log2(3 * e))
        Vector code = sub_i32(top_bits, load(bytes_.top_bit + at));
        code = select_i32(greater_u32(total, limit), code, add_i32(code, one));
        code = select_i32(greater_u32(shl_each_i32(triple, code), total), add_i32(code, one), code);
        return select_i32(greater_u32(triple, twice_sum), code, zero());
    }

    // code = min(round(e * r / 2^shift), last), r = round(mult / sum) < 2^31. Products fit in 64 bits, all other
    // numbers in 31: see AttentionBytes::is_supported.
    FQVIT_AVX512 void uniform_weights(std::uint32_t sum, std::int64_t distances,
                                      std::uint8_t (&by_distance)[2][256]) const {
        const Vector r = set_i32(static_cast<std::int32_t>(round_divide(head_.softmax_mult, sum)));
        const Vector half = set_i64(std::int64_t{1} << (head_.softmax_shift - 1)), shift = set_i64(head_.softmax_shift);
        for (std::int64_t d = 0; d < distances; d += 64) {
            const Vector first = uniform_codes(d, r, half, shift), second = uniform_codes(d + 16, r, half, shift);
            const Vector third = uniform_codes(d + 32, r, half, shift), fourth = uniform_codes(d + 48, r, half, shift);
            const Vector code = narrow(first, second, third, fourth);
            store(by_distance[0] + d, ByteTable(bytes_.weight_low, head_.softmax_last + 1)[code]);
            store(by_distance[1] + d, ByteTable(bytes_.weight_high, head_.softmax_last + 1)[code]);
        }
    }

    FQVIT_INLINE Vector uniform_codes(std::int64_t at, Vector r, Vector half, Vector shift) const {
        alignas(64) static constexpr std::int32_t LOW_HALVES[16] = {0, 16, 2,  18, 4,  20, 6,  22,
                                                                    8, 24, 10, 26, 12, 28, 14, 30};
        const Vector e = load(bytes_.table + at);
        const Vector even = shr_each_i64(add_i64(mul_even(e, r), half), shift);
        const Vector odd = shr_each_i64(add_i64(mul_even(shr_i64(e, 32), r), half), shift);
        return min_i32(permute2_i32(even, load(LOW_HALVES), odd), set_i32(head_.softmax_last));
    }

    const Attention& head_;
    const AttentionBytes& bytes_;
    std::int64_t length_;
    Vector last_;
};

}  // namespace fqvit::FQVIT_AVX512_NAMESPACE
