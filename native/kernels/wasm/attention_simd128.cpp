// One head of attention with SIMD128, four rows at a time, so that scores and weights stay in the L1 cache.
//     scores = requantize(Q K^T + bias)   weights = softmax(scores)   y = requantize(weights V)
//
// Both products multiply i16 x i16 (pairs_simd128.h). This is exact because codes minus their zero point need 9 bits,
// weights need 16, and the ops prove that every sum fits in i32. Keys and values are packed once per head, in panels of
// 8 columns that store pairs of adjacent elements along the reduction.
#if defined(__wasm_simd128__)

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/aligned.h"
#include "core/fixed.h"
#include "kernels/wasm/kernels_simd128.h"
#include "kernels/wasm/pairs_simd128.h"
#include "kernels/wasm/simd128.h"
#include "kernels/wasm/softmax_simd128.h"

namespace fqvit {
namespace {

using namespace simd128;

constexpr int ROWS = TILE_ROWS, COLUMNS = 2 * TILE_COLUMNS;
constexpr std::int64_t MAX_WIDTH = 1024, MAX_TOKENS = 4096;
// Elements between rows of queries, weights and scores. Constants, so that loads have row offsets as immediates. Not
// powers of two, so that rows fall into different cache sets.
constexpr int Q_STRIDE = MAX_WIDTH + 16, W_STRIDE = MAX_TOKENS + 48, S_STRIDE = MAX_TOKENS + 32;

// Offsets in the scratch memory.
struct Layout {
    std::size_t keys, values, queries, scores, weights, tile, regions, end;

    explicit Layout(const Attention& head) {
        std::size_t at = 0;
        const auto reserve = [&](std::int64_t bytes) {
            return std::exchange(at, at + static_cast<std::size_t>(round_up(bytes, 64)));
        };
        keys = reserve(round_up(head.tokens, COLUMNS) * round_up(head.width, 8) * 2);
        values = reserve(round_up(head.value_width, COLUMNS) * round_up(head.tokens, 2) * 2);
        queries = reserve(ROWS * Q_STRIDE * 2);
        scores = reserve(ROWS * S_STRIDE);
        weights = reserve(ROWS * W_STRIDE * 2);
        tile = reserve(ROWS * COLUMNS * 4);
        regions = reserve(S_STRIDE);
        end = at;
    }
};

// Loads 8 codes and subtracts the zero point, as i16. If `count` < 8, reads only `count` codes; the other lanes are 0.
FQVIT_SIMD_INLINE v128_t load_centered(const std::uint8_t* p, std::int64_t count, v128_t zero) {
    if (count >= 8) return wasm_i16x8_sub(wasm_u16x8_load8x8(p), zero);
    std::uint8_t copy[8] = {};
    std::memcpy(copy, p, static_cast<std::size_t>(count));
    const v128_t index = wasm_i16x8_const(0, 1, 2, 3, 4, 5, 6, 7);
    const v128_t exists = wasm_i16x8_lt(index, wasm_i16x8_splat(static_cast<std::int16_t>(count)));
    return wasm_v128_and(wasm_i16x8_sub(wasm_u16x8_load8x8(copy), zero), exists);
}

// Transposes a 4 x 4 matrix of 32-bit elements, each a pair of i16.
FQVIT_SIMD_INLINE void transpose(v128_t (&m)[4]) {
    const v128_t a = wasm_i32x4_shuffle(m[0], m[1], 0, 4, 1, 5), b = wasm_i32x4_shuffle(m[0], m[1], 2, 6, 3, 7);
    const v128_t c = wasm_i32x4_shuffle(m[2], m[3], 0, 4, 1, 5), d = wasm_i32x4_shuffle(m[2], m[3], 2, 6, 3, 7);
    m[0] = wasm_i64x2_shuffle(a, c, 0, 2), m[1] = wasm_i64x2_shuffle(a, c, 1, 3);
    m[2] = wasm_i64x2_shuffle(b, d, 0, 2), m[3] = wasm_i64x2_shuffle(b, d, 1, 3);
}

std::int64_t key_pairs(const Attention& head) { return round_up(head.width, 8) / 2; }

// Packs K as i16 [T / 8][D / 2][8][2], padded with zeros.
void pack_keys(const Attention& head, const std::uint8_t* k, std::int16_t* out) {
    const v128_t zero = wasm_i16x8_splat(static_cast<std::int16_t>(head.k_zero));
    const std::int64_t pairs = key_pairs(head);
    for (std::int64_t t = 0; t < round_up(head.tokens, COLUMNS); t += 4) {
        std::int16_t* panel = out + t / TILE_COLUMNS * pairs * 2 * TILE_COLUMNS + t % TILE_COLUMNS * 2;
        for (std::int64_t c = 0; c < head.width; c += 8) {
            v128_t rows[4];
            for (int i = 0; i < 4; ++i) {
                rows[i] = t + i < head.tokens ? load_centered(k + (t + i) * head.k_stride + c, head.width - c, zero)
                                              : wasm_i16x8_const_splat(0);
            }
            transpose(rows);
            for (int i = 0; i < 4; ++i) wasm_v128_store(panel + (c / 2 + i) * 2 * TILE_COLUMNS, rows[i]);
        }
    }
}

// Packs V as i16 [D / 8][T / 2][8][2], padded with zeros.
void pack_values(const Attention& head, const std::uint8_t* v, std::int16_t* out) {
    const v128_t zero = wasm_i16x8_splat(static_cast<std::int16_t>(head.v_zero));
    const std::int64_t pairs = (head.tokens + 1) / 2;
    for (std::int64_t c = 0; c < round_up(head.value_width, COLUMNS); c += TILE_COLUMNS) {
        const std::int64_t count = std::max<std::int64_t>(head.value_width - c, 0);
        for (std::int64_t p = 0; p < pairs; ++p, out += 2 * TILE_COLUMNS) {
            v128_t rows[2];
            for (int i = 0; i < 2; ++i) {
                const std::int64_t t = 2 * p + i;
                rows[i] = t < head.tokens && count > 0 ? load_centered(v + t * head.v_stride + c, count, zero)
                                                       : wasm_i16x8_const_splat(0);
            }
            wasm_v128_store(out, wasm_i16x8_shuffle(rows[0], rows[1], 0, 8, 1, 9, 2, 10, 3, 11));
            wasm_v128_store(out + TILE_COLUMNS, wasm_i16x8_shuffle(rows[0], rows[1], 4, 12, 5, 13, 6, 14, 7, 15));
        }
    }
}

// Raises the shift up to 32 while mult stays below 2^31; mult * 2^j / 2^(shift + j) is the same ratio for every j.
// Returns whether the shift is now 32 or more, which RequantizeHigh needs.
bool raise_shift(std::int64_t& mult, int& shift) {
    while (shift < 32 && mult < std::int64_t{1} << 30) mult *= 2, ++shift;
    return shift >= 32;
}

// Requantizes 16 accumulators to u8.
struct ToCodes {
    v128_t zero, last;

    ToCodes(std::int32_t zero_point, std::int32_t last_code)
        : zero(wasm_i32x4_splat(zero_point)), last(wasm_u8x16_splat(static_cast<std::uint8_t>(last_code))) {}

    FQVIT_SIMD_INLINE v128_t operator()(const v128_t (&acc)[4], const RequantizeHigh& requantize) const {
        v128_t code[4];
        for (int i = 0; i < 4; ++i) code[i] = wasm_i32x4_add(requantize(acc[i]), zero);
        return to_u8(code[0], code[1], code[2], code[3], last);
    }
};

// Computes the score codes of `rows` queries against all keys.
void compute_scores(const Attention& head, const RequantizeHigh& requantize, const std::int16_t* queries,
                    const std::int16_t* keys, int rows, const std::int32_t* bias, std::uint8_t* scores,
                    std::int32_t* tile) {
    const ToCodes to_codes(head.score_zero, head.score_last);
    const std::int64_t panel = key_pairs(head) * 2 * TILE_COLUMNS, pairs = (head.width + 1) / 2;
    for (std::int64_t t = 0; t < head.tokens; t += COLUMNS, keys += 2 * panel) {
        BY_ROWS<Q_STRIDE, 2>[rows](queries, keys, pairs, tile, COLUMNS);
        BY_ROWS<Q_STRIDE, 2>[rows](queries, keys + panel, pairs, tile + TILE_COLUMNS, COLUMNS);
        for (int r = 0; r < rows; ++r) {
            v128_t acc[4];
            for (int i = 0; i < 4; ++i) {
                acc[i] = wasm_v128_load(tile + r * COLUMNS + 4 * i);
                if (bias == nullptr) continue;
                const std::int32_t* at = bias + r * round_up(head.tokens, COLUMNS) + t + 4 * i;
                acc[i] = wasm_i32x4_add(acc[i], wasm_v128_load(at));
            }
            wasm_v128_store(scores + r * S_STRIDE + t, to_codes(acc, requantize));
        }
    }
}

}  // namespace

std::size_t attention_scratch_simd128(const Attention& head) {
    std::int64_t score_mult = head.score_mult, mult = head.mult;
    int score_shift = head.score_shift, shift = head.shift;
    const bool supported = head.width <= MAX_WIDTH && head.tokens <= MAX_TOKENS &&
                           raise_shift(score_mult, score_shift) && raise_shift(mult, shift);
    return supported ? Layout(head).end : 0;
}

void attention_simd128(const Attention& head, const std::uint8_t* q, const std::uint8_t* k, const std::uint8_t* v,
                       const std::int32_t* bias, const std::uint8_t* region, std::uint8_t* y, std::uint8_t* scratch) {
    const Layout at(head);
    auto* keys = reinterpret_cast<std::int16_t*>(scratch + at.keys);
    auto* values = reinterpret_cast<std::int16_t*>(scratch + at.values);
    auto* queries = reinterpret_cast<std::int16_t*>(scratch + at.queries);
    std::uint8_t *scores = scratch + at.scores, *regions = scratch + at.regions;
    auto* weights = reinterpret_cast<std::int16_t*>(scratch + at.weights);
    auto* tile = reinterpret_cast<std::int32_t*>(scratch + at.tile);
    pack_keys(head, k, keys);
    pack_values(head, v, values);
    if (region != nullptr) {
        std::memcpy(regions, region, static_cast<std::size_t>(head.tokens));
        std::memset(regions + head.tokens, 0, 16);
        region = regions;
    }
    std::int64_t score_mult = head.score_mult, mult = head.mult;
    int score_shift = head.score_shift, shift = head.shift;
    raise_shift(score_mult, score_shift);
    raise_shift(mult, shift);
    const std::int64_t factor = std::int64_t{1} << (shift - head.shift);
    const RequantizeHigh to_scores = RequantizeHigh::per_tensor(score_mult, score_shift);
    const ToCodes to_codes(head.y_zero, head.y_last);
    const v128_t q_zero = wasm_i16x8_splat(static_cast<std::int16_t>(head.q_zero));
    const std::int64_t pairs = (head.tokens + 1) / 2, panel = pairs * 2 * TILE_COLUMNS;
    const bool by_code = head.kind == Attention::RELATIVE && head.sixteen_codes;
    const bool by_reach = has_log_weights(head, region);
    for (std::int64_t first = 0; first < head.queries; first += ROWS) {
        const int rows = static_cast<int>(std::min<std::int64_t>(ROWS, head.queries - first));
        for (int r = 0; r < rows; ++r) {
            const std::uint8_t* from = q + (first + r) * head.q_stride;
            for (std::int64_t c = 0; c < head.width; c += 8) {
                wasm_v128_store(queries + r * Q_STRIDE + c, load_centered(from + c, head.width - c, q_zero));
            }
        }
        compute_scores(head, to_scores, queries, keys, rows,
                       bias == nullptr ? nullptr : bias + first * round_up(head.tokens, COLUMNS), scores, tile);
        RequantizeHigh to_y[ROWS];
        for (int r = 0; r < rows; ++r) {
            const ScoreRow row{scores + r * S_STRIDE, head.tokens, region,
                               region == nullptr ? std::uint8_t{0} : region[first + r]};
            std::int16_t* row_weights = weights + r * W_STRIDE;
            const std::uint8_t top = row.mask_and_maximum();
            std::int64_t sum = 0, row_mult = mult;
            if (by_reach) {
                log_weights(head, row, top, row_weights);
            } else {
                sum = (by_code ? relative_weights : softmax_row)(head, row, top, row_weights);
            }
            if (head.kind == Attention::RELATIVE) {
                row_mult = round_divide(head.mult * head.largest_weight, sum * head.sign) * factor;
            }
            to_y[r] = RequantizeHigh::per_tensor(row_mult, shift);
        }
        for (std::int64_t c = 0; c < head.value_width; c += COLUMNS) {
            const std::int16_t* columns = values + c / TILE_COLUMNS * panel;
            BY_ROWS<W_STRIDE, 2>[rows](weights, columns, pairs, tile, COLUMNS);
            BY_ROWS<W_STRIDE, 2>[rows](weights, columns + panel, pairs, tile + TILE_COLUMNS, COLUMNS);
            const std::int64_t count = std::min<std::int64_t>(COLUMNS, head.value_width - c);
            for (int r = 0; r < rows; ++r) {
                v128_t acc[4];
                for (int i = 0; i < 4; ++i) {
                    acc[i] = wasm_v128_load(tile + r * COLUMNS + 4 * i);
                    if (head.sign < 0) acc[i] = wasm_i32x4_neg(acc[i]);
                }
                const v128_t codes = to_codes(acc, to_y[r]);
                std::uint8_t* out = y + (first + r) * head.y_stride + c;
                if (count >= COLUMNS) {
                    wasm_v128_store(out, codes);
                } else {
                    std::uint8_t copy[COLUMNS];
                    wasm_v128_store(copy, codes);
                    std::memcpy(out, copy, static_cast<std::size_t>(count));
                }
            }
        }
    }
}

}  // namespace fqvit

#endif
