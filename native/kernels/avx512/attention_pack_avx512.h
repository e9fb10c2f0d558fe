// Packs the keys and values of one head for attention_avx512.cpp: subtracts 128, so that they fit in i8, and stores
// them in panels of columns and in quads of four consecutive elements of the reduction.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/attention_bytes.h"
#include "kernels/avx512/avx512.h"
#include "kernels/kernels.h"

namespace fqvit::FQVIT_AVX512_NAMESPACE {

constexpr int PANEL = 64;

// Returns the number of columns of the next panel if `left` columns remain: 16, 32 or 64.
constexpr std::int64_t panel_columns(std::int64_t left) { return left > 32 ? 64 : left > 16 ? 32 : 16; }
// Returns the number of columns of all panels.
constexpr std::int64_t padded_columns(std::int64_t columns) {
    return columns / PANEL * PANEL + (columns % PANEL == 0 ? 0 : panel_columns(columns % PANEL));
}

// Loads 16 bytes of tokens t, t + 4, t + 8 and t + 12, one token per lane. Tokens past the end repeat the last one.
FQVIT_INLINE Vector load_tokens(const Attention& head, const std::uint8_t* k, std::int64_t t, std::uint16_t bytes) {
    const std::int64_t last = head.tokens - 1, stride = head.k_stride;
    return load_lanes(k + std::min(t, last) * stride, k + std::min(t + 4, last) * stride,
                      k + std::min(t + 8, last) * stride, k + std::min(t + 12, last) * stride, bytes);
}

// Stores the elements of 16 quads minus 128 and adds the original elements to the sums of their tokens.
FQVIT_INLINE void store_keys(Vector quads, std::int8_t* to, Vector& sum) {
    sum = dpbusd(sum, quads, set_i8(1));
    store(to, xor_bits(quads, set_i8(-128)));
}

// Packs K - 128 as i8 [panels][D / 4][columns][4], and sets terms[t] = -q_zero * sum (k[t] - k_zero).
inline FQVIT_AVX512 void pack_keys(const Attention& head, const std::uint8_t* k, std::int8_t* out,
                                   std::int32_t* terms) {
    const Vector q_zero = set_i32(-head.q_zero), k_zeros = set_i32(static_cast<std::int32_t>(head.width) * head.k_zero);
    const std::int64_t chunks = (head.width + 15) / 16;
    for (std::int64_t first = 0; first < head.tokens; first += PANEL) {
        const std::int64_t columns = panel_columns(head.tokens - first), step = 4 * columns;
        for (std::int64_t c = 0; c < columns; c += 16) {
            Vector sum = zero();
            for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
                // Transposing 4 x 4 quads in every lane gives vectors with one quad of each of 16 tokens.
                const std::uint8_t* from = k + 16 * chunk;
                const std::uint16_t bytes = first_16(head.width - 16 * chunk);
                const Vector a = load_tokens(head, from, first + c, bytes);
                const Vector b = load_tokens(head, from, first + c + 1, bytes);
                const Vector d = load_tokens(head, from, first + c + 2, bytes);
                const Vector e = load_tokens(head, from, first + c + 3, bytes);
                const Vector ab = interleave_low_i32(a, b), de = interleave_low_i32(d, e);
                const Vector ab_high = interleave_high_i32(a, b), de_high = interleave_high_i32(d, e);
                std::int8_t* to = out + 4 * chunk * step + 4 * c;
                store_keys(interleave_low_i64(ab, de), to, sum);
                store_keys(interleave_high_i64(ab, de), to + step, sum);
                store_keys(interleave_low_i64(ab_high, de_high), to + 2 * step, sum);
                store_keys(interleave_high_i64(ab_high, de_high), to + 3 * step, sum);
            }
            store(terms + first + c, mul_i32(sub_i32(sum, k_zeros), q_zero));
        }
        out += 4 * chunks * step;
    }
}

// Packs V - 128 as i8 [panels][T / 4][columns][4], and sets terms[c] = w_min * sum (v[c] - v_zero) for the smallest
// weight w_min.
inline FQVIT_AVX512 void pack_values(const Attention& head, const std::uint8_t* v, std::int8_t* out,
                                     std::int32_t* terms) {
    const Vector flip = set_i8(-128), ones = set_i8(1);
    const Vector least = set_i32(head.bytes->least_weight);
    const Vector zeros = set_i32(static_cast<std::int32_t>(head.tokens) * head.v_zero);
    const std::int64_t quads = (head.tokens + 3) / 4;
    for (std::int64_t first = 0; first < head.value_width; first += PANEL) {
        const std::int64_t columns = panel_columns(head.value_width - first);
        for (std::int64_t c = 0; c < columns; c += 16) {
            const std::int64_t left = head.value_width - first - c;
            const std::uint16_t bytes = left > 0 ? first_16(left) : std::uint16_t{0};
            const std::uint8_t* from = v + (left > 0 ? first + c : 0);
            Vector sum = zero();
            for (std::int64_t q = 0; q < quads; ++q, from += 4 * head.v_stride) {
                // Tokens past the end have weight 0, so any row can take their place, but the sum must not include it.
                const std::int64_t rows = std::min<std::int64_t>(4, head.tokens - 4 * q);
                const std::uint8_t *b = from + (rows > 1 ? head.v_stride : 0),
                                   *d = from + (rows > 2 ? 2 * head.v_stride : 0);
                const std::uint8_t* e = from + (rows > 3 ? 3 * head.v_stride : 0);
                const Vector quad = transpose_quads(load_lanes(from, b, d, e, bytes));
                sum = dpbusd(sum, quad, rows == 4 ? ones : set_i32((1 << (8 * rows)) / 255));
                store(out + q * 4 * columns + 4 * c, xor_bits(quad, flip));
            }
            store(terms + first + c, mul_i32(sub_i32(sum, zeros), least));
        }
        out += quads * 4 * columns;
    }
}

}  // namespace fqvit::FQVIT_AVX512_NAMESPACE
