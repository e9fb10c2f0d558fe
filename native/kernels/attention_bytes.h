// The tables of one attention head by byte, padded to 256 entries, for kernels that look up many distances or codes at
// a time. Filled once when a model is loaded.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "kernels/kernels.h"

namespace fqvit {

struct AttentionBytes {
    // Weights minus the least one, by distance to the largest score (RELATIVE) or by code. least_weight <= 0.
    alignas(64) std::uint8_t weight_low[256], weight_high[256];
    // LOG and UNIFORM: the low, middle and high bytes of the exponential of each distance.
    alignas(64) std::uint8_t exponential[3][256];
    // LOG and UNIFORM: the exponential e of each distance; LOG: 3 e, floor(log2(3 e)), and the last code where e is 0.
    alignas(64) std::int32_t table[256], triple[256], top_bit[256], least_code[256];
    std::int32_t least_weight = 0;
    std::uint8_t masked_low, masked_high;  // bytes of the weight of tokens in another region, minus the least one
    bool high_is_zero;
    // Whether exponentials have three bytes, the sum of a row is at most 2^30, and all numbers of UNIFORM fit in 31
    // bits except products.
    bool is_supported;

    AttentionBytes() = default;

    // codes: the number of entries of head.weight.
    AttentionBytes(const Attention& head, std::int64_t codes) : AttentionBytes() {
        std::int32_t largest_weight = 0;
        for (std::int64_t code = 0; code < codes; ++code) {
            least_weight = std::min(least_weight, head.sign * head.weight[code]);
            largest_weight = std::max(largest_weight, head.sign * head.weight[code]);
        }
        high_is_zero = largest_weight - least_weight < 256;
        const auto word = [&](std::int64_t code) {
            return static_cast<std::uint32_t>(head.sign * head.weight[std::min(code, codes - 1)] - least_weight);
        };
        masked_low = static_cast<std::uint8_t>(word(head.masked_code));
        masked_high = static_cast<std::uint8_t>(word(head.masked_code) >> 8);
        is_supported = true;
        for (std::int64_t i = 0; i < 256; ++i) {
            const std::int32_t entry = head.table[std::min(i, head.table_length - 1)];
            const std::uint32_t w = word(head.kind == Attention::RELATIVE ? entry : i);
            weight_low[i] = static_cast<std::uint8_t>(w), weight_high[i] = static_cast<std::uint8_t>(w >> 8);
            if (head.kind == Attention::RELATIVE) continue;
            is_supported = is_supported && entry < 1 << 24 && entry * head.tokens <= 1 << 30;
            table[i] = entry;
            for (int byte = 0; byte < 3; ++byte) exponential[byte][i] = static_cast<std::uint8_t>(entry >> (8 * byte));
            triple[i] = is_supported ? 3 * entry : 0;
            top_bit[i] =
                entry == 0 ? 0 : static_cast<std::int32_t>(std::bit_width(static_cast<std::uint32_t>(triple[i]))) - 1;
            least_code[i] = entry == 0 ? head.softmax_last : 0;
        }
        if (head.kind == Attention::UNIFORM) {
            // r <= mult / e[0] + 1, because e[0] is in every sum; e r <= mult + e.
            is_supported = is_supported && head.softmax_mult / head.table[0] < (1 << 30) &&
                           (head.softmax_mult >> head.softmax_shift) < 1 << 30;
        }
    }
};

}  // namespace fqvit
