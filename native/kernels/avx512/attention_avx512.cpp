// One head of attention with AVX-512, up to six rows at a time, so that scores and weights stay in the L1 cache.
//     scores = requantize(Q K^T + bias)   weights = softmax(scores)   y = requantize(weights V)
//
// Both products use vpdpbusd, which multiplies u8 by i8. Packing subtracts 128 from keys and values, and the products
// are corrected by terms per row and per column:
//     sum (q - q_zero) * (k - k_zero) = sum q * (k - 128) + (128 - k_zero) * sum q - q_zero * sum (k - k_zero)
//     sum w * (v - v_zero) = sum w' * (v - 128) + (128 - v_zero) * sum w' + w_min * sum (v - v_zero), w' = w - w_min
// where w_min is the smallest weight.
// w' is stored as two bytes, w' = high * 2^split + low: the sum over the high bytes is computed first and shifted, then
// the sum over the low bytes is added to it. Blocks of 64 tokens whose bytes are 0 in all rows are skipped. Every step
// is exact modulo 2^32, and the ops prove that the final sums fit in i32.
//
// Keys and values are packed once per head in panels of 16, 32 or 64 columns, in quads of four consecutive elements of
// the reduction. A tile of 6 rows x 64 columns has 24 accumulators, 4 vectors of keys or values, and 1 of queries or
// weights: 29 of 32 registers.
#if defined(__x86_64__) && defined(__GNUC__)

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/aligned.h"
#include "core/fixed.h"
#include "kernels/attention_bytes.h"
#include "kernels/avx2/attention_avx2.h"
#include "kernels/avx512/attention_pack_avx512.h"
#include "kernels/avx512/kernels_avx512.h"
#include "kernels/avx512/softmax_avx512.h"

namespace fqvit::FQVIT_AVX512_NAMESPACE {
namespace {

constexpr int ROWS = 6;
constexpr std::int64_t MAX_WIDTH = 1024, MAX_TOKENS = 4096;
// Bytes between rows of queries, and of scores and weights. Constants, so that instructions hold row offsets as
// immediates. Not powers of two, so that rows fall into different cache sets.
constexpr int Q_STRIDE = MAX_WIDTH + 64, W_STRIDE = MAX_TOKENS + 64;

// Offsets in the scratch memory.
struct Layout {
    std::size_t keys, key_terms, values, value_terms, queries, low, high, end;

    explicit Layout(const Attention& head) {
        std::size_t at = 0;
        const auto reserve = [&](std::int64_t bytes) {
            return std::exchange(at, at + static_cast<std::size_t>(round_up(bytes, 64)));
        };
        const std::int64_t tokens = padded_columns(head.tokens), channels = padded_columns(head.value_width);
        keys = reserve(tokens * round_up(head.width, 16));
        key_terms = reserve(tokens * 4);
        values = reserve(channels * round_up(head.tokens, 4));
        value_terms = reserve(channels * 4);
        queries = reserve(ROWS * Q_STRIDE);
        low = reserve(ROWS * W_STRIDE);
        high = reserve(ROWS * W_STRIDE);
        end = at;
    }
};

// clamp((acc * mult + addend) >> (32 + shift), 0, last) of 16 lanes, for vectors of 64 codes.
struct Requantizer {
    Vector mult, addend, shift, last;

    FQVIT_AVX512 Requantizer(std::int64_t m, int shift_, std::int32_t zero_point, std::int32_t last_)
        : mult(set_i32(static_cast<std::int32_t>(m))),
          addend(set_i64((std::int64_t{1} << (shift_ - 1)) + (std::int64_t{zero_point} << shift_))),
          shift(set_i32(shift_ - 32)),
          last(set_i8(last_)) {}

    // The high halves of the 64-bit products, shifted.
    FQVIT_INLINE Vector scale(Vector acc, Vector by) const {
        const Vector even = add_i64(mul_even(acc, by), addend), odd = add_i64(mul_even(shr_i64(acc, 32), by), addend);
        return sar_each_i32(permute2_i32(even, load(HIGH_HALVES), odd), shift);
    }

    FQVIT_INLINE Vector narrow_codes(Vector a, Vector b, Vector c, Vector d) const {
        return min_u8(narrow(a, b, c, d), last);
    }

    alignas(64) static constexpr std::int32_t HIGH_HALVES[16] = {1, 17, 3,  19, 5,  21, 7,  23,
                                                                 9, 25, 11, 27, 13, 29, 15, 31};
};

// A tile of R rows x N vectors. Vector i belongs to row i / N; functions enumerate all i at compile time, because GCC
// keeps an array in memory if a loop indexes it.
template <int R, int N>
struct Tile {
    using Indices = std::make_integer_sequence<int, R * N>;

    Vector acc[R * N];

    template <int... i>
    FQVIT_INLINE void clear(std::integer_sequence<int, i...>) {
        ((acc[i] = zero()), ...);
    }

    // acc = columns + rows
    template <int... i>
    FQVIT_INLINE void set_terms(const std::int32_t* columns, const std::int32_t* rows,
                                std::integer_sequence<int, i...>) {
        ((acc[i] = add_i32(load(columns + i % N * 16), broadcast_i32(rows + i / N))), ...);
    }

    // acc = 2^split * acc + columns + rows
    template <int... i>
    FQVIT_INLINE void add_terms(const std::int32_t* splits, const std::int32_t* columns, const std::int32_t* rows,
                                std::integer_sequence<int, i...>) {
        ((acc[i] = add_i32(shl_each_i32(acc[i], broadcast_i32(splits + i / N)),
                           add_i32(load(columns + i % N * 16), broadcast_i32(rows + i / N)))),
         ...);
    }

    template <int... i>
    FQVIT_INLINE void add_bias(const std::int32_t* bias, std::int64_t stride, std::int64_t columns,
                               std::integer_sequence<int, i...>) {
        ((acc[i] = add_i32(acc[i], load_i32(bias + i / N * stride + i % N * 16,
                                            first_16(std::max<std::int64_t>(columns - i % N * 16, 0))))),
         ...);
    }

    // The micro-kernel: acc[r] += sum over quads of a[r] * b. stride: bytes between rows of a; b: i8 [quads][16 * N][4]
    template <int stride>
    FQVIT_INLINE void multiply(const std::uint8_t* a, const std::int8_t* b, std::int64_t quads) {
        for (; quads > 0; --quads, a += 4, b += 64 * N) {
            Vector panel[N];
            panel[0] = load(b);
            if constexpr (N > 1) panel[1] = load(b + 64);
            if constexpr (N > 2) panel[2] = load(b + 128), panel[3] = load(b + 192);
            multiply_row<0, stride>(a, panel);
        }
    }
    // The same for the blocks of 16 quads whose bit is set.
    template <int stride>
    FQVIT_INLINE void multiply_blocks(std::uint64_t blocks, const std::uint8_t* a, const std::int8_t* b,
                                      std::int64_t quads) {
        for (; blocks != 0; blocks >>= 1, a += 64, b += 16 * 64 * N, quads -= 16) {
            if (blocks & 1) multiply<stride>(a, b, quads < 16 ? quads : 16);
        }
    }
    template <int r, int stride>
    FQVIT_INLINE void multiply_row(const std::uint8_t* a, const Vector (&panel)[N]) {
        const Vector quad = broadcast_i32(a + r * stride);
        Vector* row = acc + r * N;
        add_dpbusd(row[0], quad, panel[0]);
        if constexpr (N > 1) add_dpbusd(row[1], quad, panel[1]);
        if constexpr (N > 2) add_dpbusd(row[2], quad, panel[2]), add_dpbusd(row[3], quad, panel[3]);
        if constexpr (r + 1 < R) multiply_row<r + 1, stride>(a, panel);
    }

    template <int r>
    FQVIT_INLINE Vector codes(const Requantizer& requantizer, Vector mult) const {
        const Vector a = requantizer.scale(acc[r * N], mult);
        if constexpr (N == 1) return requantizer.narrow_codes(a, a, a, a);
        if constexpr (N == 2) {
            const Vector b = requantizer.scale(acc[r * N + 1], mult);
            return requantizer.narrow_codes(a, b, a, b);
        }
        if constexpr (N == 4) {
            return requantizer.narrow_codes(a, requantizer.scale(acc[r * N + 1], mult),
                                            requantizer.scale(acc[r * N + 2], mult),
                                            requantizer.scale(acc[r * N + 3], mult));
        }
    }
};

struct ScoreTile {
    const Requantizer* requantizer;
    const std::uint8_t* queries;
    const std::int8_t* keys;
    std::int64_t quads;
    const std::int32_t* columns;  // terms of the tokens
    const std::int32_t* rows;     // terms of the queries
    const std::int32_t* bias;     // or null
    std::int64_t bias_stride, tokens;
    std::uint8_t* codes;
};

template <int R, int N, int... r>
FQVIT_INLINE void store_scores(const ScoreTile& job, const Tile<R, N>& tile, std::integer_sequence<int, r...>) {
    const Requantizer requantizer = *job.requantizer;
    (store(job.codes + r * W_STRIDE, tile.template codes<r>(requantizer, requantizer.mult)), ...);
}

template <int R, int N>
FQVIT_AVX512 void compute_scores(const ScoreTile& job) {
    const typename Tile<R, N>::Indices all;
    Tile<R, N> tile;
    tile.set_terms(job.columns, job.rows, all);
    if (job.bias != nullptr) tile.add_bias(job.bias, job.bias_stride, job.tokens, all);
    tile.template multiply<Q_STRIDE>(job.queries, job.keys, job.quads);
    store_scores(job, tile, std::make_integer_sequence<int, R>());
}

struct ValueTile {
    const Requantizer* requantizer;
    const std::uint8_t *low, *high;         // bytes of the weights
    std::uint64_t low_blocks, high_blocks;  // blocks of 64 tokens that are not all 0
    const std::int8_t* values;
    std::int64_t quads;
    const std::int32_t* columns;         // terms of the channels
    const std::int32_t* rows;            // terms of the queries
    const std::int32_t *splits, *mults;  // one per query
    std::uint8_t* y;
    std::int64_t y_stride, channels;
};

template <int R, int N, int... r>
FQVIT_INLINE void store_values(const ValueTile& job, const Tile<R, N>& tile, std::integer_sequence<int, r...>) {
    const Requantizer requantizer = *job.requantizer;
    const std::uint64_t mask = first_64(job.channels);
    (store_i8(job.y + r * job.y_stride, mask, tile.template codes<r>(requantizer, broadcast_i32(job.mults + r))), ...);
}

template <int R, int N>
FQVIT_AVX512 void multiply_values(const ValueTile& job) {
    const typename Tile<R, N>::Indices all;
    Tile<R, N> tile;
    tile.clear(all);
    tile.template multiply_blocks<W_STRIDE>(job.high_blocks, job.high, job.values, job.quads);
    tile.add_terms(job.splits, job.columns, job.rows, all);
    tile.template multiply_blocks<W_STRIDE>(job.low_blocks, job.low, job.values, job.quads);
    store_values(job, tile, std::make_integer_sequence<int, R>());
}

// Kernels by number of rows (6 or 1) and number of columns (16, 32 or 64).
struct RowKernels {
    void (*scores[3])(const ScoreTile&);
    void (*values[3])(const ValueTile&);
};
template <int R>
constexpr RowKernels ROW_KERNELS = {{compute_scores<R, 1>, compute_scores<R, 2>, compute_scores<R, 4>},
                                    {multiply_values<R, 1>, multiply_values<R, 2>, multiply_values<R, 4>}};
constexpr int by_columns(std::int64_t columns) { return columns == 64 ? 2 : columns == 32 ? 1 : 0; }

// Returns a * b modulo 2^32.
std::int32_t wrapping_product(std::int32_t a, std::int32_t b) {
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(a) * static_cast<std::uint32_t>(b));
}

// Raises the shift up to 32 while mult stays below 2^31; mult * 2^j / 2^(shift + j) is the same ratio for every j.
// Returns whether the shift is then between 32 and 52, so that Requantizer can add the zero point before the shift.
bool raise_shift(std::int64_t& mult, int& shift) {
    while (shift < 32 && mult < std::int64_t{1} << 30) mult *= 2, ++shift;
    return shift >= 32 && shift <= 52;
}

bool is_supported(const Attention& head) {
    std::int64_t score_mult = head.score_mult, mult = head.mult;
    int score_shift = head.score_shift, shift = head.shift;
    return head.width <= MAX_WIDTH && head.tokens <= MAX_TOKENS && head.bytes->is_supported &&
           raise_shift(score_mult, score_shift) && raise_shift(mult, shift);
}

}  // namespace

std::size_t attention_scratch(const Attention& head) {
    return is_supported(head) ? Layout(head).end : attention_scratch_avx2(head);
}

FQVIT_AVX512 void attention(const Attention& head, const std::uint8_t* q, const std::uint8_t* k, const std::uint8_t* v,
                            const std::int32_t* bias, const std::uint8_t* region, std::uint8_t* y,
                            std::uint8_t* scratch) {
    if (!is_supported(head)) {
        attention_avx2(head, q, k, v, bias, region, y, scratch);
        return;
    }
    const Layout at(head);
    auto* keys = reinterpret_cast<std::int8_t*>(scratch + at.keys);
    auto* values = reinterpret_cast<std::int8_t*>(scratch + at.values);
    auto* key_terms = reinterpret_cast<std::int32_t*>(scratch + at.key_terms);
    auto* value_terms = reinterpret_cast<std::int32_t*>(scratch + at.value_terms);
    std::uint8_t *queries = scratch + at.queries, *low = scratch + at.low, *high = scratch + at.high;
    pack_keys(head, k, keys, key_terms);
    pack_values(head, v, values, value_terms);
    std::int64_t score_mult = head.score_mult, mult = head.mult, factor = 1;
    int score_shift = head.score_shift, shift = head.shift;
    raise_shift(score_mult, score_shift);
    raise_shift(mult, shift);
    for (int s = head.shift; s < shift; ++s) factor *= 2;
    const Requantizer to_scores(score_mult, score_shift, head.score_zero, head.score_last);
    const Requantizer to_y(0, shift, head.y_zero, head.y_last);
    const Softmax softmax(head);
    const Vector ones = set_i8(1);
    const std::int64_t bias_stride = round_up(head.tokens, 16);
    const std::int64_t key_quads = (head.width + 15) / 16 * 4, value_quads = (head.tokens + 3) / 4;
    for (std::int64_t first = 0; first < head.queries;) {
        // A remainder of 2 to 5 rows is computed together with the rows before it, which get the same codes again.
        const std::int64_t left = head.queries - first;
        const int rows = left == 1 || head.queries < ROWS ? 1 : ROWS;
        if (rows > left) first = head.queries - rows;
        const RowKernels& kernels = rows == 1 ? ROW_KERNELS<1> : ROW_KERNELS<ROWS>;
        std::int32_t row_terms[ROWS], splits[ROWS], mults[ROWS];
        for (int r = 0; r < rows; ++r) {
            Vector sum = zero();
            for (std::int64_t c = 0; c < head.width; c += 64) {
                const Vector codes = load_i8(q + (first + r) * head.q_stride + c, first_64(head.width - c));
                store(queries + r * Q_STRIDE + c, codes);
                sum = dpbusd(sum, codes, ones);
            }
            row_terms[r] = (128 - head.k_zero) * sum_i32(sum);
        }
        const std::int8_t* panel = keys;
        for (std::int64_t t = 0; t < head.tokens; t += PANEL) {
            const std::int64_t columns = panel_columns(head.tokens - t);
            kernels.scores[by_columns(columns)]({&to_scores, queries, panel, (head.width + 3) / 4, key_terms + t,
                                                 row_terms, bias == nullptr ? nullptr : bias + first * bias_stride + t,
                                                 bias_stride, head.tokens - t, low + t});
            panel += key_quads * 4 * columns;
        }
        std::uint64_t low_blocks = 0, high_blocks = 0;
        for (int r = 0; r < rows; ++r) {
            const RowWeights row = softmax(low + r * W_STRIDE, high + r * W_STRIDE, region, first + r);
            low_blocks |= row.low_blocks, high_blocks |= row.high_blocks;
            splits[r] = row.split;
            row_terms[r] = wrapping_product(128 - head.v_zero, row.sum);
            mults[r] = static_cast<std::int32_t>(head.kind == Attention::RELATIVE
                                                     ? round_divide(head.mult * head.largest_weight, row.sum) * factor
                                                     : mult);
        }
        panel = values;
        for (std::int64_t c = 0; c < head.value_width; c += PANEL) {
            const std::int64_t columns = panel_columns(head.value_width - c);
            kernels.values[by_columns(columns)]({&to_y, low, high, low_blocks, high_blocks, panel, value_quads,
                                                 value_terms + c, row_terms, splits, mults,
                                                 y + first * head.y_stride + c, head.y_stride, head.value_width - c});
            panel += value_quads * 4 * columns;
        }
        first += rows;
    }
}

}  // namespace fqvit::FQVIT_AVX512_NAMESPACE

#endif
