// One head of attention with AVX2, eleven rows at a time, so that scores and weights stay in the L1 cache.
//     scores = requantize(Q K^T + bias)   weights = softmax(scores)   y = requantize(weights V)
//
// The scores are computed by the micro-kernel of gemm_avx2.cpp, which multiplies u8 by i8. Packing subtracts 128 from
// the keys, and the products are corrected by terms per row and per column:
//     sum (q - q_zero) * (k - k_zero) = sum q * (k - 128) + (128 - k_zero) * sum q - q_zero * sum (k - k_zero)
// Packing also arranges the keys so that no sum in i16 can saturate, see KeyPanels.
//
// The second product multiplies i16 x i16 with vpmaddwd. This is exact because values minus their zero point need 9
// bits, weights need 16, and the ops prove that every sum fits in i32. Values are packed once per head, in panels of 16
// columns that store pairs of adjacent tokens. Tile: 6 rows x 16 columns. 12 accumulators, 2 vectors of values, 2
// temporaries: all 16 registers.
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
#include "kernels/gemm.h"

namespace fqvit {
namespace {

using namespace avx2;

constexpr int ROWS = TILE_ROWS, COLUMNS = 16, VALUE_ROWS = 6;
constexpr std::int64_t MAX_WIDTH = 1024, MAX_TOKENS = 4096;
constexpr int MAX_CANDIDATES = 4;  // quads that are tried as partners of a quad of keys
// Bytes between rows of weights and scores. Constants, so that instructions hold row offsets as immediates. Not powers
// of two, so that rows fall into different cache sets.
constexpr int W_STRIDE = (MAX_TOKENS + 48) * 2;
constexpr std::int64_t S_STRIDE = MAX_TOKENS + 32;

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
        values = reserve(round_up(head.value_width, COLUMNS) * round_up(head.tokens, 2) * 2);
        queries = reserve(quads * QUAD);
        scores = reserve(ROWS * S_STRIDE);
        weights = reserve(ROWS * W_STRIDE);
        tile = reserve(2 * ROWS * TILE_COLUMNS * 4);
        regions = reserve(S_STRIDE);
        end = at;
    }
};

// Adds the products of one pair of row r with the pairs of 16 columns.
template <int r>
FQVIT_INLINE void add_pair(__m256i& left, __m256i& right, const std::uint8_t* a, __m256i b_left, __m256i b_right) {
    __m256i t, u;
    asm volatile(
        "vpbroadcastd %c[o](%[a]), %[t]\n\t"
        "vpmaddwd %[bl], %[t], %[u]\n\t"
        "vpmaddwd %[br], %[t], %[t]\n\t"
        "vpaddd %[u], %[l], %[l]\n\t"
        "vpaddd %[t], %[r], %[r]"
        : [l] "+x"(left), [r] "+x"(right), [t] "=&x"(t), [u] "=&x"(u)
        : [a] "r"(a), [o] "i"(W_STRIDE * r), [bl] "x"(b_left), [br] "x"(b_right), "m"(asm_input<W_STRIDE * r + 4>(a)));
}

// The micro-kernel: out[r][c] = sum over pairs of a[r] * b[c]. b: i16 [pairs][16][2]
template <int... r>
FQVIT_INLINE void multiply_rows(std::integer_sequence<int, r...>, const std::uint8_t* a, const std::int16_t* b,
                                std::int64_t pairs, std::int32_t* out) {
    __m256i left[sizeof...(r)] = {((void)r, _mm256_setzero_si256())...};
    __m256i right[sizeof...(r)] = {((void)r, _mm256_setzero_si256())...};
    for (; pairs > 0; --pairs, a += 4, b += 2 * COLUMNS) {
        const __m256i b_left = load(b), b_right = load(b + COLUMNS);
        (add_pair<r>(left[r], right[r], a, b_left, b_right), ...);
    }
    ((store(out + COLUMNS * r, left[r]), store(out + COLUMNS * r + 8, right[r])), ...);
}

template <int rows>
FQVIT_AVX2 void multiply_values(const std::uint8_t* a, const std::int16_t* b, std::int64_t pairs, std::int32_t* out) {
    multiply_rows(std::make_integer_sequence<int, rows>(), a, b, pairs, out);
}

using ValueKernel = void (*)(const std::uint8_t*, const std::int16_t*, std::int64_t, std::int32_t*);
constexpr ValueKernel MULTIPLY_VALUES[VALUE_ROWS + 1] = {nullptr,
                                                         multiply_values<1>,
                                                         multiply_values<2>,
                                                         multiply_values<3>,
                                                         multiply_values<4>,
                                                         multiply_values<5>,
                                                         multiply_values<6>};

// Loads 16 codes and subtracts the zero point, as i16. Reads only `count` bytes if that is less than 16.
FQVIT_INLINE __m256i load_centered(const std::uint8_t* p, std::int64_t count, __m256i zero) {
    __m128i codes;
    if (count >= 16) {
        codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    } else {
        alignas(16) std::uint8_t copy[16] = {};
        std::memcpy(copy, p, static_cast<std::size_t>(count));
        codes = _mm_load_si128(reinterpret_cast<const __m128i*>(copy));
    }
    return _mm256_sub_epi16(_mm256_cvtepu8_epi16(codes), zero);
}

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
    for (std::int64_t t = 0; t < round_up(head.tokens, COLUMNS); t += TILE_COLUMNS) {
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
        to.blocks[panel] = {0, 0, panel * entries, panel * entries * sizeof(__m256i)};
        pack_key_quads(quads, count, to.blocks[panel], to);
    }
}

// Packs V as i16 [D / 16][T / 2][16][2]. The padding of T is 0.
FQVIT_AVX2 void pack_values(const Attention& head, const std::uint8_t* v, std::int16_t* out) {
    const __m256i zero = _mm256_set1_epi16(static_cast<short>(head.v_zero));
    const std::int64_t pairs = (head.tokens + 1) / 2;
    for (std::int64_t c = 0; c < head.value_width; c += COLUMNS) {
        const std::int64_t count = std::min<std::int64_t>(16, head.value_width - c);
        for (std::int64_t p = 0; p < pairs; ++p, out += 2 * COLUMNS) {
            const __m256i a = load_centered(v + 2 * p * head.v_stride + c, count, zero);
            const __m256i b = 2 * p + 1 < head.tokens ? load_centered(v + (2 * p + 1) * head.v_stride + c, count, zero)
                                                      : _mm256_setzero_si256();
            const __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
            store(out, _mm256_permute2x128_si256(low, high, 0x20));
            store(out + COLUMNS, _mm256_permute2x128_si256(low, high, 0x31));
        }
    }
}

// 16 x i32 -> 16 x u8
FQVIT_INLINE __m128i saturate_u8(__m256i left, __m256i right) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(left, right), 0xd8);
    return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

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
FQVIT_AVX2 void compute_scores(const Attention& head, const RequantizeHigh& requantize_high,
                               const std::uint8_t* queries, const std::int32_t* row_terms, const KeyPanels& keys,
                               int rows, const std::int32_t* bias, std::uint8_t* scores, std::int32_t* tile) {
    const __m256i zero = _mm256_set1_epi32(head.score_zero);
    const __m128i last = _mm_set1_epi8(static_cast<char>(head.score_last));
    const KBlock* block = keys.blocks;
    for (std::int64_t t = 0; t < head.tokens; t += COLUMNS) {
        for (int half = 0; half < 2; ++half, ++block) {
            MULTIPLY_QUADS[rows](*block, queries, keys.offsets + block->offsets, keys.weights + block->weights,
                                 keys.terms + t + half * TILE_COLUMNS, rows, tile + half * ROWS * TILE_COLUMNS);
        }
        for (int r = 0; r < rows; ++r) {
            const __m256i row_term = _mm256_set1_epi32(row_terms[r]);
            __m256i left = _mm256_add_epi32(load(tile + r * TILE_COLUMNS), row_term);
            __m256i right = _mm256_add_epi32(load(tile + (ROWS + r) * TILE_COLUMNS), row_term);
            if (bias != nullptr) {
                const std::int32_t* at = bias + r * round_up(head.tokens, COLUMNS) + t;
                left = _mm256_add_epi32(left, load(at)), right = _mm256_add_epi32(right, load(at + 8));
            }
            const __m128i codes = saturate_u8(_mm256_add_epi32(requantize_high(left), zero),
                                              _mm256_add_epi32(requantize_high(right), zero));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(scores + r * S_STRIDE + t), _mm_min_epu8(codes, last));
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
    pack_keys(head, k, keys);
    pack_values(head, v, values);
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
    const RequantizeHigh to_scores = RequantizeHigh::per_tensor(score_mult, score_shift);
    CodeWeights code_weights(head);
    const bool by_code = has_vector_softmax(head, region);
    const __m256i y_zero = _mm256_set1_epi32(head.y_zero);
    const __m128i y_last = _mm_set1_epi8(static_cast<char>(head.y_last));
    const std::int64_t pairs = (head.tokens + 1) / 2;
    for (std::int64_t first = 0; first < head.queries; first += ROWS) {
        const int rows = static_cast<int>(std::min<std::int64_t>(ROWS, head.queries - first));
        const std::uint8_t* q_rows = q + first * head.q_stride;
        gemm_avx2()->pack_rows(q_rows, head.q_stride, rows, head.width, queries);
        std::int32_t row_terms[ROWS];
        for (int r = 0; r < rows; ++r) {
            row_terms[r] = (128 - head.k_zero) * sum_codes(q_rows + r * head.q_stride, head.width);
        }
        compute_scores(head, to_scores, queries, row_terms, keys, rows,
                       bias == nullptr ? nullptr : bias + first * round_up(head.tokens, COLUMNS), scores, tile);
        RequantizeHigh requantize_high[ROWS];
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
            requantize_high[r] = RequantizeHigh::per_tensor(row_mult, shift);
        }
        const std::int16_t* panel = values;
        for (std::int64_t c = 0; c < head.value_width; c += COLUMNS, panel += pairs * 2 * COLUMNS) {
            const std::int64_t count = std::min<std::int64_t>(16, head.value_width - c);
            for (int r = 0; r < rows; ++r) {
                const int row = r % VALUE_ROWS;  // in the tile
                if (row == 0) {
                    const auto* tile_weights = reinterpret_cast<const std::uint8_t*>(weights) + r * W_STRIDE;
                    MULTIPLY_VALUES[std::min(VALUE_ROWS, rows - r)](tile_weights, panel, pairs, tile);
                }
                __m256i left = load(tile + row * COLUMNS), right = load(tile + row * COLUMNS + 8);
                if (head.sign < 0) {
                    left = _mm256_sub_epi32(_mm256_setzero_si256(), left);
                    right = _mm256_sub_epi32(_mm256_setzero_si256(), right);
                }
                const __m128i saturated = saturate_u8(_mm256_add_epi32(requantize_high[r](left), y_zero),
                                                      _mm256_add_epi32(requantize_high[r](right), y_zero));
                const __m128i codes = _mm_min_epu8(saturated, y_last);
                std::uint8_t* out = y + (first + r) * head.y_stride + c;
                if (count >= 16) {
                    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), codes);
                } else {
                    alignas(16) std::uint8_t copy[16];
                    _mm_store_si128(reinterpret_cast<__m128i*>(copy), codes);
                    std::memcpy(out, copy, static_cast<std::size_t>(count));
                }
            }
        }
    }
}

}  // namespace fqvit

#endif
