// One head of attention with NEON, four rows at a time, so that scores and weights stay in the L1 cache.
//     scores = requantize(Q K^T + bias)   weights = softmax(scores)   y = requantize(weights V)
//
// Both products multiply u8 x u8 and subtract the zero points afterwards:
//     sum (q - q_zero) * (k - k_zero) = sum q * k - k_zero * sum q - q_zero * sum k + D * q_zero * k_zero
//     sum w * (v - v_zero) = sum u * v - v_zero * sum u - offset * (sum v - T * v_zero)
// where u = w + offset is stored as two bytes.
// Exact because every step is exact modulo 2^32, and the ops prove that the results fit in i32. Keys and values are
// packed once per head, in panels of 16 columns that store groups of four adjacent elements along the reduction.
#if defined(__aarch64__) && defined(__GNUC__)

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/aligned.h"
#include "core/fixed.h"
#include "kernels/neon/kernels_neon.h"
#include "kernels/neon/neon.h"
#include "kernels/neon/softmax_neon.h"

namespace fqvit {
namespace {

using namespace neon;

constexpr int ROWS = ATTENTION_ROWS, COLUMNS = ATTENTION_COLUMNS;
constexpr std::int64_t MAX_TOKENS = 65536;

// Offsets in the scratch memory.
struct Layout {
    std::size_t keys, key_terms, values, value_terms, queries, scores, low, high, tile, regions, end;
    std::int64_t tokens, width;  // rounded up to 16

    explicit Layout(const Attention& head) : tokens(round_up(head.tokens, 16)), width(round_up(head.width, 16)) {
        std::size_t at = 0;
        const auto reserve = [&](std::int64_t bytes) {
            return std::exchange(at, at + static_cast<std::size_t>(round_up(bytes, 64)));
        };
        const std::int64_t value_width = round_up(head.value_width, COLUMNS);
        keys = reserve(tokens * width);
        key_terms = reserve(tokens * 4);
        values = reserve(value_width * tokens);
        value_terms = reserve(value_width * 4);
        queries = reserve(ROWS * width);
        scores = reserve(ROWS * tokens);
        low = reserve(ROWS * tokens);
        high = reserve(ROWS * tokens);
        tile = reserve(ROWS * COLUMNS * 4);
        regions = reserve(tokens);
        end = at;
    }
};

// Transposes a 4 x 4 matrix of 32-bit elements, each a group of four bytes.
FQVIT_NEON_INLINE void transpose(uint32x4_t (&m)[4]) {
    const uint32x4_t a = vzip1q_u32(m[0], m[2]), b = vzip2q_u32(m[0], m[2]);
    const uint32x4_t c = vzip1q_u32(m[1], m[3]), d = vzip2q_u32(m[1], m[3]);
    m[0] = vzip1q_u32(a, c), m[1] = vzip2q_u32(a, c), m[2] = vzip1q_u32(b, d), m[3] = vzip2q_u32(b, d);
}

// Packs K as u8 [T / 16][D / 4][16][4], padded with zeros, and sets terms[t] = D * q_zero * k_zero - q_zero * sum k.
void pack_keys(const Attention& head, const Layout& at, const std::uint8_t* k, std::uint8_t* out,
               std::uint32_t* terms) {
    const auto constant = static_cast<std::uint32_t>(head.width * head.q_zero * head.k_zero);
    for (std::int64_t t = 0; t < at.tokens; t += 4) {
        std::uint8_t* panel = out + t / COLUMNS * at.width * COLUMNS + t % COLUMNS * 4;
        uint32x4_t sums[4] = {vdupq_n_u32(0), vdupq_n_u32(0), vdupq_n_u32(0), vdupq_n_u32(0)};
        for (std::int64_t c = 0; c < head.width; c += 16) {
            uint32x4_t rows[4];
            for (int i = 0; i < 4; ++i) {
                const uint8x16_t row =
                    t + i < head.tokens ? load_some(k + (t + i) * head.k_stride + c, head.width - c) : vdupq_n_u8(0);
                sums[i] = vpadalq_u16(sums[i], vpaddlq_u8(row));
                rows[i] = vreinterpretq_u32_u8(row);
            }
            transpose(rows);
            for (int i = 0; i < 4; ++i) {
                vst1q_u8(panel + (c / 4 + i) * 4 * COLUMNS, vreinterpretq_u8_u32(rows[i]));
            }
        }
        const uint32x4_t sum = vpaddq_u32(vpaddq_u32(sums[0], sums[1]), vpaddq_u32(sums[2], sums[3]));
        vst1q_u32(terms + t, vmlsq_n_u32(vdupq_n_u32(constant), sum, static_cast<std::uint32_t>(head.q_zero)));
    }
}

// Packs V as u8 [D / 16][T / 4][16][4], padded with zeros, and sets terms[d] = -offset * sum v.
void pack_values(const Attention& head, const Layout& at, const std::uint8_t* v, std::uint32_t offset,
                 std::uint8_t* out, std::uint32_t* terms) {
    for (std::int64_t c = 0; c < head.value_width; c += COLUMNS) {
        std::uint32_t sums[COLUMNS] = {};
        for (std::int64_t t = 0; t < at.tokens; t += 4, out += 4 * COLUMNS) {
            uint8x16x4_t rows;
            for (int i = 0; i < 4; ++i) {
                rows.val[i] = t + i < head.tokens ? load_some(v + (t + i) * head.v_stride + c, head.value_width - c)
                                                  : vdupq_n_u8(0);
            }
            vst4q_u8(out, rows);
            if (offset == 0) continue;
            for (int i = 0; i < COLUMNS; ++i) sums[i] += out[4 * i] + out[4 * i + 1] + out[4 * i + 2] + out[4 * i + 3];
        }
        for (int i = 0; i < COLUMNS; ++i) terms[c + i] = 0u - offset * sums[i];
    }
}

// Raises the shift up to 32 while mult stays below 2^31; mult * 2^j / 2^(shift + j) is the same ratio for every j.
// Returns whether the shift is now 32 or more, which RequantizeHigh needs.
bool raise_shift(std::int64_t& mult, int& shift) {
    while (shift < 32 && mult < std::int64_t{1} << 30) mult *= 2, ++shift;
    return shift >= 32;
}

// Adds one term per column and one term per row to 16 accumulators and converts the sums to codes.
struct ToCodes {
    int16x8_t zero;
    uint8x8_t last;

    ToCodes(std::int32_t zero_point, std::int32_t last_code)
        : zero(vdupq_n_s16(static_cast<std::int16_t>(zero_point))),
          last(vdup_n_u8(static_cast<std::uint8_t>(last_code))) {}

    FQVIT_NEON_INLINE uint8x16_t operator()(const std::uint32_t* acc, const std::uint32_t* terms, std::uint32_t term,
                                            const std::int32_t* bias, const RequantizeHigh& requantize) const {
        int32x4_t code[4];
        for (int i = 0; i < 4; ++i) {
            uint32x4_t sum = vaddq_u32(vld1q_u32(acc + 4 * i), vld1q_u32(terms + 4 * i));
            sum = vaddq_u32(sum, vdupq_n_u32(term));
            if (bias != nullptr) sum = vaddq_u32(sum, vreinterpretq_u32_s32(vld1q_s32(bias + 4 * i)));
            code[i] = requantize(vreinterpretq_s32_u32(sum));
        }
        return vcombine_u8(to_u8(code[0], code[1], zero, last), to_u8(code[2], code[3], zero, last));
    }
};

// A block of up to four queries: the location of their rows, and -k_zero * sum q for each query.
struct Queries {
    const std::uint8_t* rows;
    std::int64_t stride;
    std::uint32_t terms[ROWS];
};

Queries prepare_queries(const Attention& head, const Layout& at, const std::uint8_t* q, int rows, std::uint8_t* copy) {
    Queries found{q, head.q_stride, {}};
    const bool copies = head.width % 16 != 0;  // the micro-kernel reads multiples of 16 bytes
    if (copies) found.rows = copy, found.stride = at.width;
    for (int r = 0; r < rows; ++r) {
        std::uint32_t sum = 0;
        for (std::int64_t c = 0; c < head.width; c += 16) {
            const uint8x16_t some = load_some(q + r * head.q_stride + c, head.width - c);
            if (copies) vst1q_u8(copy + r * at.width + c, some);
            sum += sum_of_bytes(some);
        }
        found.terms[r] = 0u - static_cast<std::uint32_t>(head.k_zero) * sum;
    }
    return found;
}

void attention(const AttentionTiles& tiles, const Attention& head, const std::uint8_t* q, const std::uint8_t* k,
               const std::uint8_t* v, const std::int32_t* bias, const std::uint8_t* region, std::uint8_t* y,
               std::uint8_t* scratch) {
    const Layout at(head);
    std::uint8_t *keys = scratch + at.keys, *values = scratch + at.values, *scores = scratch + at.scores;
    std::uint8_t *low = scratch + at.low, *high = scratch + at.high, *regions = scratch + at.regions;
    auto* key_terms = reinterpret_cast<std::uint32_t*>(scratch + at.key_terms);
    auto* value_terms = reinterpret_cast<std::uint32_t*>(scratch + at.value_terms);
    auto* tile = reinterpret_cast<std::uint32_t*>(scratch + at.tile);
    Softmax softmax(head);
    const WeightBytes& weights = softmax.weights();
    const auto offset = static_cast<std::uint32_t>(weights.offset), v_zero = static_cast<std::uint32_t>(head.v_zero);
    pack_keys(head, at, k, keys, key_terms);
    pack_values(head, at, v, offset, values, value_terms);
    if (region != nullptr) {
        std::memcpy(regions, region, static_cast<std::size_t>(head.tokens));
        std::memset(regions + head.tokens, 0, static_cast<std::size_t>(at.tokens - head.tokens));
    }
    std::int64_t score_mult = head.score_mult, mult = head.mult;
    int score_shift = head.score_shift, shift = head.shift;
    raise_shift(score_mult, score_shift);
    raise_shift(mult, shift);
    const std::int64_t factor = std::int64_t{1} << (shift - head.shift);
    const RequantizeHigh to_scores = RequantizeHigh::per_tensor(score_mult, score_shift);
    const ToCodes score_codes(head.score_zero, head.score_last), y_codes(head.y_zero, head.y_last);
    for (std::int64_t first = 0; first < head.queries; first += ROWS) {
        const int rows = static_cast<int>(std::min<std::int64_t>(ROWS, head.queries - first));
        const Queries queries = prepare_queries(head, at, q + first * head.q_stride, rows, scratch + at.queries);
        for (std::int64_t t = 0; t < at.tokens; t += COLUMNS) {
            tiles.by_rows[rows](queries.rows, nullptr, queries.stride, keys + t * at.width, at.width / 16, tile);
            for (int r = 0; r < rows; ++r) {
                const std::int32_t* row_bias = bias == nullptr ? nullptr : bias + (first + r) * at.tokens + t;
                vst1q_u8(scores + r * at.tokens + t,
                         score_codes(tile + r * COLUMNS, key_terms + t, queries.terms[r], row_bias, to_scores));
            }
        }
        RequantizeHigh to_y[ROWS];
        std::uint32_t terms[ROWS];
        for (int r = 0; r < rows; ++r) {
            const std::uint8_t query_region = region == nullptr ? std::uint8_t{0} : region[first + r];
            const ScoreRow row{scores + r * at.tokens, head.tokens, region == nullptr ? nullptr : regions,
                               query_region};
            const std::int64_t sum = softmax(row, low + r * at.tokens, high + r * at.tokens);
            std::int64_t row_mult = mult;
            if (head.kind == Attention::RELATIVE) {
                const std::int64_t divisor = sum - weights.offset * head.tokens;
                row_mult = round_divide(head.mult * head.largest_weight, divisor) * factor;
            }
            to_y[r] = RequantizeHigh::per_tensor(row_mult, shift);
            terms[r] = v_zero * (offset * static_cast<std::uint32_t>(head.tokens) - static_cast<std::uint32_t>(sum));
        }
        const std::uint8_t *upper = weights.has_high() ? high : low, *lower = weights.has_high() ? low : nullptr;
        for (std::int64_t c = 0; c < head.value_width; c += COLUMNS) {
            tiles.by_rows[rows](upper, lower, at.tokens, values + c * at.tokens, at.tokens / 16, tile);
            const std::int64_t count = std::min<std::int64_t>(16, head.value_width - c);
            for (int r = 0; r < rows; ++r) {
                const uint8x16_t codes = y_codes(tile + r * COLUMNS, value_terms + c, terms[r], nullptr, to_y[r]);
                std::uint8_t* out = y + (first + r) * head.y_stride + c;
                if (count >= 16) {
                    vst1q_u8(out, codes);
                } else {
                    std::uint8_t copy[16];
                    vst1q_u8(copy, codes);
                    std::memcpy(out, copy, static_cast<std::size_t>(count));
                }
            }
        }
    }
}

}  // namespace

std::size_t attention_scratch_neon(const Attention& head) {
    std::int64_t score_mult = head.score_mult, mult = head.mult;
    int score_shift = head.score_shift, shift = head.shift;
    const bool supported =
        head.tokens <= MAX_TOKENS && raise_shift(score_mult, score_shift) && raise_shift(mult, shift);
    return supported ? Layout(head).end : 0;
}

void attention_neon(const Attention& head, const std::uint8_t* q, const std::uint8_t* k, const std::uint8_t* v,
                    const std::int32_t* bias, const std::uint8_t* region, std::uint8_t* y, std::uint8_t* scratch) {
    attention(attention_tiles_neon(), head, q, k, v, bias, region, y, scratch);
}

void attention_neon_dotprod(const Attention& head, const std::uint8_t* q, const std::uint8_t* k, const std::uint8_t* v,
                            const std::int32_t* bias, const std::uint8_t* region, std::uint8_t* y,
                            std::uint8_t* scratch) {
    attention(*attention_tiles_neon_dotprod(), head, q, k, v, bias, region, y, scratch);
}

}  // namespace fqvit

#endif
