// One head of attention with AVX2, eleven rows at a time, so that scores and weights stay in the L1 cache.
//     scores = requantize(Q K^T + bias)   weights = softmax(scores)   y = requantize(weights V)
//
// The scores are computed by the micro-kernel of gemm_avx2.cpp, which multiplies u8 by i8. Packing subtracts 128 from
// the keys, and the products are corrected by terms per row and per column:
//     sum (q - q_zero) * (k - k_zero) = sum q * (k - 128) + (128 - k_zero) * sum q - q_zero * sum (k - k_zero)
// Packing also arranges the keys so that no sum in i16 can saturate, see KeyPanels.
// values_avx2.h has the second product.
#if defined(__x86_64__) && defined(__GNUC__)

#include "kernels/avx2/attention_avx2.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/aligned.h"
#include "core/fixed.h"
#include "kernels/avx2/avx2.h"
#include "kernels/avx2/quads_avx2.h"
#include "kernels/avx2/softmax_avx2.h"
#include "kernels/avx2/values_avx2.h"
#include "kernels/gemm.h"

namespace fqvit {
namespace {

using namespace avx2;

constexpr int ROWS = TILE_ROWS, COLUMNS = 16;
constexpr std::int64_t SCORE_PANELS = 16;  // panels of keys whose scores are computed together
constexpr int PANEL = ROWS * TILE_COLUMNS;
static_assert(VALUE_COLUMNS <= SCORE_PANELS * TILE_COLUMNS);  // both products use the same tile
constexpr std::int64_t MAX_WIDTH = 1024;
constexpr int MAX_CANDIDATES = 4;                   // quads that are tried as partners of a quad of keys
constexpr std::int64_t S_STRIDE = MAX_TOKENS + 32;  // bytes between rows of scores, not a power of two, like W_STRIDE

// Offsets in the scratch memory.
struct Layout {
    std::size_t keys, key_offsets, key_blocks, key_terms, values, queries, scores, weights, tile, regions, end;

    explicit Layout(const Attention& head) {
        std::size_t at = 0;
        const auto reserve = [&](std::int64_t bytes) {
            return std::exchange(at, at + static_cast<std::size_t>(round_up(bytes, 64)));
        };
        const std::int64_t tokens = round_up(head.tokens, COLUMNS), quads = (head.width + 3) / 4;
        // Every quad may be split into two.
        keys = reserve(tokens * quads * 2 * 4);
        key_offsets = reserve(tokens / TILE_COLUMNS * quads * 2 * static_cast<std::int64_t>(sizeof(std::uint16_t)));
        key_blocks = reserve(tokens / TILE_COLUMNS * static_cast<std::int64_t>(sizeof(KBlock)));
        key_terms = reserve(tokens * 4);
        values = reserve(round_up(head.value_width, VALUE_COLUMNS) * round_up(head.tokens, 2) * 2);
        queries = reserve(quads * QUAD);
        scores = reserve(ROWS * S_STRIDE);
        weights = reserve(ROWS * W_STRIDE);
        tile = reserve(SCORE_PANELS * ROWS * TILE_COLUMNS * 4);
        regions = reserve(S_STRIDE);
        end = at;
    }
};

// K - 128 as weights of the micro-kernel, in panels of 8 tokens.
struct KeyPanels {
    std::int8_t* weights;
    std::uint16_t* offsets;
    KBlock* blocks;       // one per panel
    std::int32_t* terms;  // of each token: -q_zero * sum (k - k_zero)
};

// Loads 32 codes. Codes past `count` are replaced by 128, which is 0 after packing.
FQVIT_INLINE __m256i load_keys(const std::uint8_t* p, std::int64_t count) {
    if (count >= 32) return load(p);
    alignas(32) std::uint8_t copy[32];
    std::memset(copy, 128, sizeof copy);
    if (count > 0) std::memcpy(copy, p, static_cast<std::size_t>(count));
    return load(copy);
}

// Packs the quads of one panel. A quad and an earlier one that together meet the limit (see gemm_avx2.cpp) form a
// double.
FQVIT_AVX2 void pack_key_quads(const __m256i* quads, int count, KBlock& block, const KeyPanels& to) {
    std::int8_t* weights = to.weights + block.weights;
    std::uint16_t* offsets = to.offsets + block.offsets;
    const auto emit = [&](__m256i w, int quad) FQVIT_AVX2 {
        store(weights, w), weights += sizeof w;
        *offsets++ = static_cast<std::uint16_t>(quad * QUAD + IN_ORDER);
    };
    int waiting[MAX_WIDTH / 4], waits = 0;
    __m256i sums[MAX_WIDTH / 4];
    for (int quad = 0; quad < count; ++quad) {
        sums[quad] = lane_sums(quads[quad]);
        int i = waits - 1;
        while (i >= 0 && i >= waits - MAX_CANDIDATES && !within_limit(_mm256_adds_epu8(sums[waiting[i]], sums[quad]))) {
            --i;
        }
        if (i >= 0 && i >= waits - MAX_CANDIDATES) {
            emit(quads[waiting[i]], waiting[i]);
            emit(quads[quad], quad);
            ++block.doubles;
            waiting[i] = waiting[--waits];
        } else {
            waiting[waits++] = quad;
        }
    }
    for (int i = 0; i < waits; ++i) {
        __m256i w = quads[waiting[i]];
        if (!within_limit(sums[waiting[i]])) {
            emit(clip_to_limit(w), waiting[i]);
            ++block.singles;
        }
        emit(w, waiting[i]);
        ++block.singles;
    }
}

FQVIT_AVX2 void pack_keys(const Attention& head, const std::uint8_t* k, const KeyPanels& to) {
    const auto width = static_cast<std::int32_t>(head.width);
    const int count = (width + 3) / 4;
    const __m256i flip = _mm256_set1_epi8(-128), ones = _mm256_set1_epi8(1), pairs = _mm256_set1_epi16(1);
    const __m256i shift = _mm256_set1_epi32(width * (128 - head.k_zero)), q_zero = _mm256_set1_epi32(-head.q_zero);
    __m256i quads[MAX_WIDTH / 4 + 8];
    for (std::int64_t t = 0; t < head.tokens; t += TILE_COLUMNS) {
        __m256i sum = _mm256_setzero_si256();
        for (int c = 0; c < width; c += 32) {
            __m256i m[8];
            for (int i = 0; i < 8; ++i) {
                m[i] = load_keys(k + (t + i) * head.k_stride + c, t + i < head.tokens ? width - c : 0);
            }
            transpose(m);
            for (int i = 0; i < 8; ++i) {
                const __m256i w = _mm256_xor_si256(m[i], flip);
                quads[c / 4 + i] = w;
                sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(ones, w), pairs));
            }
        }
        store(to.terms + t, _mm256_mullo_epi32(_mm256_add_epi32(sum, shift), q_zero));
        const auto panel = static_cast<std::size_t>(t / TILE_COLUMNS), entries = static_cast<std::size_t>(2 * count);
        to.blocks[panel] = {0, 0, 0, static_cast<std::uint32_t>(panel * entries), panel * entries * sizeof(__m256i)};
        pack_key_quads(quads, count, to.blocks[panel], to);
    }
}

// Requantizes 32 accumulators: clamp(round_shift(acc * mult, shift) + zero, 0, last) with a shift of at least 32. half:
// the rounding term. The zero point is added with 16 bits: values that saturate there are codes 0 or 255 in any case.
struct ToCodes {
    __m256i shift, zero, last;

    FQVIT_AVX2 ToCodes(int s, std::int32_t z, std::int32_t most)
        : shift(_mm256_set1_epi32(s - 32)),
          zero(_mm256_set1_epi16(static_cast<short>(z))),
          last(_mm256_set1_epi8(static_cast<char>(most))) {}

    FQVIT_INLINE __m256i operator()(__m256i a, __m256i b, __m256i c, __m256i d, __m256i mult, __m256i half) const {
        const RequantizeHigh high = {mult, mult, half, half, shift};
        const __m256i low = _mm256_adds_epi16(_mm256_packs_epi32(high(a), high(b)), zero);
        const __m256i upper = _mm256_adds_epi16(_mm256_packs_epi32(high(c), high(d)), zero);
        const __m256i codes = _mm256_min_epu8(_mm256_packus_epi16(low, upper), last);
        return _mm256_permutevar8x32_epi32(codes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    }
};

// Raises the shift up to 32 while mult stays below 2^31; mult * 2^j / 2^(shift + j) is the same ratio for every j.
// Returns whether the shift is now 32 or more, which RequantizeHigh needs.
bool raise_shift(std::int64_t& mult, int& shift) {
    while (shift < 32 && mult < std::int64_t{1} << 30) mult *= 2, ++shift;
    return shift >= 32;
}

// Returns the sum of `count` codes.
FQVIT_INLINE std::int32_t sum_codes(const std::uint8_t* p, std::int64_t count) {
    __m256i sums = _mm256_setzero_si256();
    std::int64_t i = 0;
    for (; i + 32 <= count; i += 32)
        sums = _mm256_add_epi64(sums, _mm256_sad_epu8(load(p + i), _mm256_setzero_si256()));
    const __m128i half = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    std::int32_t total = _mm_cvtsi128_si32(half) + _mm_extract_epi32(half, 2);
    for (; i < count; ++i) total += p[i];
    return total;
}

// Computes the score codes of `rows` queries against all keys, and writes 32 zeros after each row.
// queries: packed   row_terms: (128 - k_zero) * sum q of each query
FQVIT_AVX2 void compute_scores(const Attention& head, std::int64_t mult, int shift, const std::uint8_t* queries,
                               const std::int32_t* row_terms, const KeyPanels& keys, int rows, const std::int32_t* bias,
                               std::uint8_t* scores, std::int32_t* tile) {
    const ToCodes to_codes(shift, head.score_zero, head.score_last);
    const __m256i mults = _mm256_set1_epi32(static_cast<int>(mult));
    std::int64_t half[ROWS];
    for (int r = 0; r < rows; ++r) {
        // Without a bias, no accumulator wraps around before its term is added, so the term can be added after the
        // multiplication.
        half[r] = (std::int64_t{1} << (shift - 1)) + (bias == nullptr ? row_terms[r] * mult : 0);
    }
    const std::int64_t stride = round_up(head.tokens, COLUMNS), panels = stride / TILE_COLUMNS;
    // Several panels at a time, before their codes, as in Linear::run.
    for (std::int64_t first = 0; first < panels; first += SCORE_PANELS) {
        const std::int64_t last = std::min(panels, first + SCORE_PANELS);
        // If the last panel has only padding, its codes are replaced by zeros below.
        for (std::int64_t panel = first; panel < last && panel * TILE_COLUMNS < head.tokens; ++panel) {
            const KBlock& block = keys.blocks[panel];
            MULTIPLY_QUADS[rows](block, queries, keys.offsets + block.offsets, keys.weights + block.weights,
                                 keys.terms + panel * TILE_COLUMNS, rows, tile + (panel - first) * PANEL);
        }
        for (std::int64_t panel = first; panel < last; panel += 4) {
            const std::int64_t t = panel * TILE_COLUMNS;
            const bool four = last - panel >= 4;  // else 2
            for (int r = 0; r < rows; ++r) {
                const std::int32_t* at = tile + (panel - first) * PANEL + r * TILE_COLUMNS;
                __m256i v0 = load(at), v1 = load(at + PANEL), v2 = _mm256_setzero_si256(), v3 = v2;
                if (four) v2 = load(at + 2 * PANEL), v3 = load(at + 3 * PANEL);
                if (bias != nullptr) {
                    const __m256i term = _mm256_set1_epi32(row_terms[r]);
                    const std::int32_t* b = bias + r * stride + t;
                    v0 = _mm256_add_epi32(v0, _mm256_add_epi32(load(b), term));
                    v1 = _mm256_add_epi32(v1, _mm256_add_epi32(load(b + 8), term));
                    if (four) {
                        v2 = _mm256_add_epi32(v2, _mm256_add_epi32(load(b + 16), term));
                        v3 = _mm256_add_epi32(v3, _mm256_add_epi32(load(b + 24), term));
                    }
                }
                const __m256i codes = to_codes(v0, v1, v2, v3, mults, _mm256_set1_epi64x(half[r]));
                store(scores + r * S_STRIDE + t, codes);
            }
        }
    }
    for (int r = 0; r < rows; ++r) std::memset(scores + r * S_STRIDE + head.tokens, 0, 32);
}

}  // namespace

std::size_t attention_scratch_avx2(const Attention& head) {
    std::int64_t score_mult = head.score_mult, mult = head.mult;
    int score_shift = head.score_shift, shift = head.shift;
    const bool supported = head.width <= MAX_WIDTH && head.tokens <= MAX_TOKENS &&
                           raise_shift(score_mult, score_shift) && raise_shift(mult, shift);
    return supported ? Layout(head).end : 0;
}

FQVIT_AVX2 void attention_avx2(const Attention& head, const std::uint8_t* q, const std::uint8_t* k,
                               const std::uint8_t* v, const std::int32_t* bias, const std::uint8_t* region,
                               std::uint8_t* y, std::uint8_t* scratch) {
    const Layout at(head);
    const KeyPanels keys = {
        reinterpret_cast<std::int8_t*>(scratch + at.keys), reinterpret_cast<std::uint16_t*>(scratch + at.key_offsets),
        reinterpret_cast<KBlock*>(scratch + at.key_blocks), reinterpret_cast<std::int32_t*>(scratch + at.key_terms)};
    auto* values = reinterpret_cast<std::int16_t*>(scratch + at.values);
    std::uint8_t *queries = scratch + at.queries, *scores = scratch + at.scores, *regions = scratch + at.regions;
    auto* weights = reinterpret_cast<std::int16_t*>(scratch + at.weights);
    auto* tile = reinterpret_cast<std::int32_t*>(scratch + at.tile);
    if (!head.same_keys) {
        pack_keys(head, k, keys);
        pack_values(head, v, values);
    }
    if (region != nullptr) {
        std::memcpy(regions, region, static_cast<std::size_t>(head.tokens));
        std::memset(regions + head.tokens, 0, 32);
        region = regions;
    }
    std::int64_t score_mult = head.score_mult, mult = head.mult, factor = 1;
    int score_shift = head.score_shift, shift = head.shift;
    raise_shift(score_mult, score_shift);
    raise_shift(mult, shift);
    for (int s = head.shift; s < shift; ++s) factor *= 2;
    CodeWeights code_weights(head);
    const bool by_code = has_vector_softmax(head, region);
    const ToCodes to_codes(shift, head.y_zero, head.y_last);
    const __m256i half = _mm256_set1_epi64x(std::int64_t{1} << (shift - 1));
    const std::int64_t pairs = (head.tokens + 1) / 2;
    for (std::int64_t first = 0; first < head.queries; first += ROWS) {
        const int rows = static_cast<int>(std::min<std::int64_t>(ROWS, head.queries - first));
        const std::uint8_t* q_rows = q + first * head.q_stride;
        gemm_avx2()->pack_rows(q_rows, head.q_stride, rows, head.width, queries);
        std::int32_t row_terms[ROWS];
        for (int r = 0; r < rows; ++r) {
            row_terms[r] = (128 - head.k_zero) * sum_codes(q_rows + r * head.q_stride, head.width);
        }
        compute_scores(head, score_mult, score_shift, queries, row_terms, keys, rows,
                       bias == nullptr ? nullptr : bias + first * round_up(head.tokens, COLUMNS), scores, tile);
        std::int32_t row_mults[ROWS];
        for (int r = 0; r < rows; ++r) {
            std::uint8_t* row = scores + r * S_STRIDE;
            auto* row_weights = weights + r * (W_STRIDE / 2);
            const std::uint8_t query_region = region == nullptr ? 0 : region[first + r];
            const std::uint8_t top = mask_and_maximum(row, head.tokens, region, query_region);
            std::int64_t row_mult = mult;
            if (head.kind == Attention::RELATIVE) {
                const std::int64_t sum = code_weights(row, top, region, query_region, row_weights) * head.sign;
                row_mult = round_divide(head.mult * head.largest_weight, sum) * factor;
            } else if (by_code) {
                alignas(32) std::uint8_t by_distance[256];
                const std::int64_t sum = sum_exponentials(head, row, top, region, query_region);
                const std::int64_t distances = std::min<std::int64_t>(top + 1, head.table_length);
                log_codes(head, sum, distances, by_distance);
                code_weights.set_codes(by_distance, distances);
                code_weights(row, top, region, query_region, row_weights);
            } else {
                softmax_row(head, row, top, region, query_region, row_weights);
            }
            row_mults[r] = static_cast<std::int32_t>(head.sign * row_mult);
        }
        const std::int16_t* panel = values;
        for (std::int64_t c = 0; c < head.value_width; c += VALUE_COLUMNS, panel += pairs * 2 * VALUE_COLUMNS) {
            const std::int64_t count = std::min<std::int64_t>(VALUE_COLUMNS, head.value_width - c);
            const ValueKernel* kernels = MULTIPLY_VALUES[count > COLUMNS ? 1 : 0];
            for (std::int64_t pair = 0; pair < pairs; pair += VALUE_BLOCK) {
                const std::int64_t block = std::min(VALUE_BLOCK, pairs - pair);
                for (int r = 0; r < rows; r += VALUE_ROWS) {
                    const auto* tile_weights = reinterpret_cast<const std::uint8_t*>(weights) + r * W_STRIDE + pair * 4;
                    kernels[std::min(VALUE_ROWS, rows - r)](tile_weights, panel + pair * 2 * VALUE_COLUMNS, block,
                                                            pair > 0, tile + r * VALUE_COLUMNS);
                }
            }
            for (int r = 0; r < rows; ++r) {
                const std::int32_t* at = tile + r * VALUE_COLUMNS;
                const __m256i codes = to_codes(load(at), load(at + 8), load(at + 16), load(at + 24),
                                               _mm256_set1_epi32(row_mults[r]), half);
                std::uint8_t* out = y + (first + r) * head.y_stride + c;
                if (count == VALUE_COLUMNS) {
                    store(out, codes);
                } else {
                    alignas(32) std::uint8_t copy[32];
                    store(copy, codes);
                    std::memcpy(out, copy, static_cast<std::size_t>(count));
                }
            }
        }
    }
}

}  // namespace fqvit

#endif
