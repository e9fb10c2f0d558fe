// The interface of the micro-kernel of gemm_avx2.cpp (gemm_tile_avx2.h), which multiplies quads of u8 activations and
// i8 weights, and the checks that its weights need. attention_avx2.cpp uses it for the scores, with the keys as
// weights. gemm_avx2.cpp describes the method.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "kernels/avx2/avx2.h"

namespace fqvit::avx2 {

constexpr int TILE_ROWS = 11, TILE_COLUMNS = 8;
constexpr int CELL = 16;                // bytes of one quad of one row
constexpr int QUAD = TILE_ROWS * CELL;  // bytes of one quad of all rows
constexpr int IN_ORDER = 1;             // offset in a cell at which the four inputs are in their original order
constexpr int LIMIT = 128;              // limit of sums of weights per lane and sign: 255 * 128 < 2^15

// One K-block of one panel: three offsets per triple, then two per double, then one per single.
// The weights are in the same order, 32 bytes per quad.
struct KBlock {
    std::uint32_t triples, doubles, singles, offsets;
    std::size_t weights;  // first entry in the arrays of offsets and weights
};

// Multiplies the quads of one K-block and adds the products to `start`, i32 [8], in every row, or to the values in
// `out` if start is null. out: i32 [rows][8], in an array of 11 rows
using MicroKernel = void (*)(const KBlock&, const std::uint8_t* block, const std::uint16_t* offsets,
                             const std::int8_t* weights, const std::int32_t* start, int rows, std::int32_t* out);
extern const MicroKernel MULTIPLY_QUADS[TILE_ROWS + 1];  // by number of rows

// Returns the sums of the weights of every lane, as bytes: per 128-bit half, 8 sums of positive weights, then 8 of
// |negative weights|.
FQVIT_INLINE __m256i lane_sums(__m256i w) {
    const __m256i zero = _mm256_setzero_si256(), ones = _mm256_set1_epi8(1);
    const __m256i positive = _mm256_maddubs_epi16(ones, _mm256_max_epi8(w, zero));
    const __m256i negative = _mm256_sub_epi16(zero, _mm256_maddubs_epi16(ones, _mm256_min_epi8(w, zero)));
    // The sum of two weights is at most 256. vpackuswb saturates it to 255, which still exceeds the limit.
    return _mm256_packus_epi16(positive, negative);
}

FQVIT_INLINE bool within_limit(__m256i sums) {
    const __m256i over = _mm256_subs_epu8(sums, _mm256_set1_epi8(static_cast<char>(LIMIT)));
    return _mm256_testz_si256(over, over) != 0;
}

// Clips the weights of a quad so that every lane meets the limit, and returns the rest.
FQVIT_INLINE __m256i clip_to_limit(__m256i& weights) {
    alignas(32) std::int8_t w[TILE_COLUMNS][4], rest[TILE_COLUMNS][4] = {};
    store(w, weights);
    for (int c = 0; c < TILE_COLUMNS; ++c) {
        for (int lane = 0; lane < 2; ++lane) {
            const int a = w[c][2 * lane], b = w[c][2 * lane + 1], sum = a + b;
            if ((a < 0) != (b < 0) || std::abs(sum) <= LIMIT) continue;
            const int excess = sum > 0 ? sum - LIMIT : sum + LIMIT;
            const int larger = 2 * lane + (std::abs(a) >= std::abs(b) ? 0 : 1);
            w[c][larger] = static_cast<std::int8_t>(w[c][larger] - excess);
            rest[c][larger] = static_cast<std::int8_t>(excess);
        }
    }
    weights = load(w);
    return load(rest);
}

}  // namespace fqvit::avx2
