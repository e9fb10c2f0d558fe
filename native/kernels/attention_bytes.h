// The tables of one attention head, with low and high bytes in separate arrays of 256 entries, for kernels that look up
// many distances or codes at a time. Filled once when a model is loaded.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "kernels/kernels.h"

namespace fqvit {

struct AttentionBytes {
    // Weights minus least_weight, which is the smallest weight or 0 if no weight is negative. These differences are
    // stored as high * 2^split + low with low < 2^split. Indexed by the distance to the largest score (RELATIVE) or by
    // code. If all differences are below 256, split is 0 and the low bytes are 0.
    alignas(64) std::uint8_t weight_low[256], weight_high[256];
    // LOG: the same, once per possible split. The split of a row is split_by_code[its smallest code], so that in more
    // rows all low bytes are 0.
    alignas(64) std::uint8_t log_low[9][64], log_high[9][64];
    std::int32_t split_by_code[16];
    std::int32_t split = 0, least_weight = 0,
                 masked_weight;  // masked_weight: weight of tokens in another region, minus least_weight
    // LOG and UNIFORM: the low, middle and high bytes of the exponential of each distance.
    alignas(64) std::uint8_t exponential[3][256];
    // table (LOG and UNIFORM): the exponential e of each distance. triple (LOG): 3 * e. top_bit (LOG):
    // floor(log2(3 * e)), or -32 if e is 0.
    alignas(64) std::int32_t table[256], triple[256], top_bit[256];
    std::int32_t reversed[256];  // reversed[i] = table[255 - i]
    // Whether exponentials fit in three bytes, the sum of a row is at most 2^30 and, for UNIFORM, all numbers except
    // products fit in 31 bits.
    bool is_supported;

    AttentionBytes() = default;

    // codes: the number of entries of head.weight.
    AttentionBytes(const Attention& head, std::int64_t codes) : AttentionBytes() {
        for (std::int64_t code = 0; code < codes; ++code) {
            least_weight = std::min(least_weight, head.sign * head.weight[code]);
        }
        const auto word = [&](std::int64_t code) {
            return static_cast<std::uint32_t>(head.sign * head.weight[std::min(code, codes - 1)] - least_weight);
        };
        const auto low = [](std::uint32_t w, std::int32_t bits) {
            return static_cast<std::uint8_t>(w & ((1u << bits) - 1));
        };
        const auto high = [](std::uint32_t w, std::int32_t bits) { return static_cast<std::uint8_t>(w >> bits); };
        for (std::int64_t code = codes - 1; code >= 0; --code) {
            split = std::max(split, static_cast<std::int32_t>(std::bit_width(word(code))) - 8);
            if (code < 16) split_by_code[code] = split;
        }
        masked_weight = static_cast<std::int32_t>(word(head.masked_code));
        for (std::int32_t bits = 0; bits <= 8 && head.kind == Attention::LOG; ++bits) {
            for (std::int64_t i = 0; i < 64; ++i) {
                log_low[bits][i] = low(word(i), bits), log_high[bits][i] = high(word(i), bits);
            }
        }
        is_supported = true;
        for (std::int64_t i = 0; i < 256; ++i) {
            const std::int32_t entry = head.table[std::min(i, head.table_length - 1)];
            const std::uint32_t w = word(head.kind == Attention::RELATIVE ? entry : i);
            weight_low[i] = low(w, split), weight_high[i] = high(w, split);
            if (head.kind == Attention::RELATIVE) continue;
            is_supported = is_supported && entry < 1 << 24 && entry * head.tokens <= 1 << 30;
            table[i] = reversed[255 - i] = entry;
            for (int byte = 0; byte < 3; ++byte) exponential[byte][i] = static_cast<std::uint8_t>(entry >> (8 * byte));
            triple[i] = is_supported ? 3 * entry : 0;
            const auto bits = static_cast<std::int32_t>(std::bit_width(static_cast<std::uint32_t>(triple[i])));
            top_bit[i] = entry == 0 ? -32 : bits - 1;
        }
        if (head.kind == Attention::UNIFORM) {
            // r = round(mult / sum) <= mult / e[0] + 1, because e[0] is part of every sum; e * r <= mult + e.
            is_supported = is_supported && head.softmax_mult / head.table[0] < (1 << 30) &&
                           (head.softmax_mult >> head.softmax_shift) < 1 << 30;
        }
    }
};

}  // namespace fqvit
