// One head of attention with AVX2, six rows at a time, so that scores and weights stay in the L1 cache.
//     scores = requantize(Q K^T + bias)   weights = softmax(scores)   y = requantize(weights V)
//
// Both products multiply i16 x i16 with vpmaddwd. This is exact because codes minus their zero point need 9 bits,
// weights need 16, and the ops prove that every sum fits in i32. Keys and values are packed once per head, in panels of
// 16 columns that store pairs of adjacent elements along the reduction.
//
// Tile: 6 rows x 16 columns. 12 accumulators, 2 vectors of keys or values, 2 temporaries: all 16 registers.
#if defined(__x86_64__) && defined(__GNUC__)

#include "kernels/avx2/attention_avx2.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/aligned.h"
#include "core/fixed.h"
#include "kernels/avx2/avx2.h"
#include "kernels/avx2/softmax_avx2.h"

namespace fqvit {
namespace {

using namespace avx2;

constexpr int ROWS = 6, COLUMNS = 16;
constexpr std::int64_t MAX_WIDTH = 1024, MAX_TOKENS = 4096;
// Bytes between rows of queries, weights and scores. Constants, so that instructions hold row offsets as immediates.
// Not powers of two, so that rows fall into different cache sets.
constexpr int Q_STRIDE = (MAX_WIDTH + 16) * 2;
constexpr int W_STRIDE = (MAX_TOKENS + 48) * 2;
constexpr std::int64_t S_STRIDE = MAX_TOKENS + 32;

// Offsets in the scratch memory.
struct Layout {
    std::size_t keys, values, queries, scores, weights, tile, regions, end;

    explicit Layout(const Attention& head) {
        std::size_t at = 0;
        const auto reserve = [&](std::int64_t bytes) {
            return std::exchange(at, at + static_cast<std::size_t>(round_up(bytes, 64)));
        };
        keys = reserve(round_up(head.tokens, COLUMNS) * round_up(head.width, 16) * 2);
        values = reserve(round_up(head.value_width, COLUMNS) * round_up(head.tokens, 2) * 2);
        queries = reserve(ROWS * Q_STRIDE);
        scores = reserve(ROWS * S_STRIDE);
        weights = reserve(ROWS * W_STRIDE);
        tile = reserve(ROWS * COLUMNS * 4);
        regions = reserve(S_STRIDE);
        end = at;
    }
};

// Adds the products of one pair of row r with the pairs of 16 columns. stride: bytes between rows of a.
template <int r, int stride>
FQVIT_INLINE void add_pair(__m256i& left, __m256i& right, const std::uint8_t* a, __m256i b_left, __m256i b_right) {
    __m256i t, u;
    asm volatile(
        "vpbroadcastd %c[o](%[a]), %[t]\n\t"
        "vpmaddwd %[bl], %[t], %[u]\n\t"
        "vpmaddwd %[br], %[t], %[t]\n\t"
        "vpaddd %[u], %[l], %[l]\n\t"
        "vpaddd %[t], %[r], %[r]"
        : [l] "+x"(left), [r] "+x"(right), [t] "=&x"(t), [u] "=&x"(u)
        : [a] "r"(a), [o] "i"(stride * r), [bl] "x"(b_left), [br] "x"(b_right), "m"(asm_input<stride * r + 4>(a)));
}

// The micro-kernel: out[r][c] = sum over pairs of a[r] b[c]. b: i16 [pairs][16][2]
template <int stride, int... r>
FQVIT_INLINE void multiply_rows(std::integer_sequence<int, r...>, const std::uint8_t* a, const std::int16_t* b,
                                std::int64_t pairs, std::int32_t* out) {
    __m256i left[sizeof...(r)] = {((void)r, _mm256_setzero_si256())...};
    __m256i right[sizeof...(r)] = {((void)r, _mm256_setzero_si256())...};
    for (; pairs > 0; --pairs, a += 4, b += 2 * COLUMNS) {
        const __m256i b_left = load(b), b_right = load(b + COLUMNS);
        (add_pair<r, stride>(left[r], right[r], a, b_left, b_right), ...);
    }
    ((store(out + COLUMNS * r, left[r]), store(out + COLUMNS * r + 8, right[r])), ...);
}

template <int stride, int rows>
FQVIT_AVX2 void multiply_tile(const std::uint8_t* a, const std::int16_t* b, std::int64_t pairs, std::int32_t* out) {
    multiply_rows<stride>(std::make_integer_sequence<int, rows>(), a, b, pairs, out);
}

using MicroKernel = void (*)(const std::uint8_t*, const std::int16_t*, std::int64_t, std::int32_t*);
template <int stride>
constexpr MicroKernel BY_ROWS[ROWS + 1] = {nullptr,
                                           multiply_tile<stride, 1>,
                                           multiply_tile<stride, 2>,
                                           multiply_tile<stride, 3>,
                                           multiply_tile<stride, 4>,
                                           multiply_tile<stride, 5>,
                                           multiply_tile<stride, 6>};

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

// Sets all but the first `count` words to 0.
FQVIT_INLINE __m256i mask_words(__m256i v, std::int64_t count) {
    if (count >= 16) return v;
    const __m256i indices = _mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm256_and_si256(v, _mm256_cmpgt_epi16(_mm256_set1_epi16(static_cast<short>(count)), indices));
}

// 8 rows of 8 pairs -> 8 pairs of 8 rows. A pair is 32 bits.
FQVIT_INLINE void transpose(__m256i (&m)[8]) {
    __m256i t[8], u[8];
    for (int i = 0; i < 4; ++i) {
        t[2 * i] = _mm256_unpacklo_epi32(m[2 * i], m[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_epi32(m[2 * i], m[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i) {
        u[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        u[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        u[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        u[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        m[i] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x20);
        m[i + 4] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x31);
    }
}

// Packs K as i16 [T / 16][D / 2][16][2], padded with zeros.
FQVIT_AVX2 void pack_keys(const Attention& head, const std::uint8_t* k, std::int16_t* out) {
    const __m256i zero = _mm256_set1_epi16(static_cast<short>(head.k_zero));
    const std::int64_t pairs = round_up(head.width, 16) / 2;
    for (std::int64_t t = 0; t < round_up(head.tokens, COLUMNS); t += 8) {
        std::int16_t* panel = out + t / COLUMNS * pairs * 2 * COLUMNS + t % COLUMNS * 2;
        for (std::int64_t c = 0; c < head.width; c += 16) {
            __m256i rows[8];
            for (int i = 0; i < 8; ++i) {
                const std::int64_t count = std::min<std::int64_t>(16, head.width - c);
                rows[i] = t + i < head.tokens
                              ? mask_words(load_centered(k + (t + i) * head.k_stride + c, count, zero), count)
                              : _mm256_setzero_si256();
            }
            transpose(rows);
            for (int i = 0; i < 8; ++i) store(panel + (c / 2 + i) * 2 * COLUMNS, rows[i]);
        }
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

// Raises the shift up to 32 while mult stays below 2^31; mult 2^j / 2^(shift + j) is the same ratio for every j.
// Returns whether the shift is now 32 or more, which RequantizeHigh needs.
bool raise_shift(std::int64_t& mult, int& shift) {
    while (shift < 32 && mult < std::int64_t{1} << 30) mult *= 2, ++shift;
    return shift >= 32;
}

// Computes the score codes of `rows` queries against all keys, and writes 32 zeros after each row.
FQVIT_AVX2 void compute_scores(const Attention& head, const RequantizeHigh& requantize_high,
                               const std::uint8_t* queries, const std::int16_t* keys, int rows,
                               const std::int32_t* bias, std::uint8_t* scores, std::int32_t* tile) {
    const __m256i zero = _mm256_set1_epi32(head.score_zero);
    const __m128i last = _mm_set1_epi8(static_cast<char>(head.score_last));
    const std::int64_t pairs = round_up(head.width, 16) / 2;
    for (std::int64_t t = 0; t < head.tokens; t += COLUMNS, keys += pairs * 2 * COLUMNS) {
        BY_ROWS<Q_STRIDE>[rows](queries, keys, (head.width + 1) / 2, tile);
        for (int r = 0; r < rows; ++r) {
            __m256i left = load(tile + r * COLUMNS), right = load(tile + r * COLUMNS + 8);
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
    auto* keys = reinterpret_cast<std::int16_t*>(scratch + at.keys);
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
    const __m256i q_zero = _mm256_set1_epi16(static_cast<short>(head.q_zero)), y_zero = _mm256_set1_epi32(head.y_zero);
    const __m128i y_last = _mm_set1_epi8(static_cast<char>(head.y_last));
    const std::int64_t pairs = (head.tokens + 1) / 2;
    for (std::int64_t first = 0; first < head.queries; first += ROWS) {
        const int rows = static_cast<int>(std::min<std::int64_t>(ROWS, head.queries - first));
        for (int r = 0; r < rows; ++r) {
            auto* out = reinterpret_cast<std::int16_t*>(queries + r * Q_STRIDE);
            for (std::int64_t c = 0; c < head.width; c += 16) {
                const std::int64_t count = std::min<std::int64_t>(16, head.width - c);
                store(out + c, mask_words(load_centered(q + (first + r) * head.q_stride + c, count, q_zero), count));
            }
        }
        compute_scores(head, to_scores, queries, keys, rows,
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
            BY_ROWS<W_STRIDE>[rows](reinterpret_cast<const std::uint8_t*>(weights), panel, pairs, tile);
            const std::int64_t count = std::min<std::int64_t>(16, head.value_width - c);
            for (int r = 0; r < rows; ++r) {
                __m256i left = load(tile + r * COLUMNS), right = load(tile + r * COLUMNS + 8);
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
