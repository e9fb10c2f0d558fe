// The product of attention weights and values for attention_avx2.cpp.
//
// It multiplies i16 x i16 with vpmaddwd. This is exact because values minus their zero point need 9 bits, weights need
// 16, and the ops prove that every sum fits in i32. Values are packed once per head, in panels of 32 columns that store
// pairs of adjacent tokens. Tile: 3 rows x 32 columns. 12 accumulators, 2 vectors of values, 2 temporaries: all 16
// registers. The other 2 vectors of values are memory operands, which cost no instruction.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/avx2/avx2.h"
#include "kernels/kernels.h"

namespace fqvit::avx2 {

constexpr int VALUE_ROWS = 3, HALF_COLUMNS = 16, VALUE_COLUMNS = 2 * HALF_COLUMNS;
constexpr std::int64_t VALUE_BLOCK = 128;  // pairs of tokens whose values, 16 KiB, stay in the L1 cache
constexpr std::int64_t MAX_TOKENS = 4096;
// Bytes between rows of weights. A constant, so that instructions hold row offsets as immediates. Not a power of two,
// so that rows fall into different cache sets.
constexpr int W_STRIDE = (MAX_TOKENS + 48) * 2;

// Adds the products of the pair at `offset` in a with the pairs of 16 columns.
template <int offset>
FQVIT_INLINE void add_pair(__m256i& left, __m256i& right, const std::uint8_t* a, __m256i b_left, __m256i b_right) {
    __m256i t, u;
    asm volatile(
        "vpbroadcastd %c[o](%[a]), %[t]\n\t"
        "vpmaddwd %[bl], %[t], %[u]\n\t"
        "vpmaddwd %[br], %[t], %[t]\n\t"
        "vpaddd %[u], %[l], %[l]\n\t"
        "vpaddd %[t], %[r], %[r]"
        : [l] "+x"(left), [r] "+x"(right), [t] "=&x"(t), [u] "=&x"(u)
        : [a] "r"(a), [o] "i"(offset), [bl] "x"(b_left), [br] "x"(b_right), "m"(asm_input<offset + 4>(a)));
}

// The same with 32 columns. more: the second half of b
template <int offset>
FQVIT_INLINE void add_pair(__m256i& c0, __m256i& c1, __m256i& c2, __m256i& c3, const std::uint8_t* a, __m256i b0,
                           __m256i b1, const __m256i* more) {
    __m256i t, u;
    asm volatile(
        "vpbroadcastd %c[o](%[a]), %[t]\n\t"
        "vpmaddwd %[b0], %[t], %[u]\n\t"
        "vpaddd %[u], %[c0], %[c0]\n\t"
        "vpmaddwd %[b1], %[t], %[u]\n\t"
        "vpaddd %[u], %[c1], %[c1]\n\t"
        "vpmaddwd %[b2], %[t], %[u]\n\t"
        "vpaddd %[u], %[c2], %[c2]\n\t"
        "vpmaddwd %[b3], %[t], %[t]\n\t"
        "vpaddd %[t], %[c3], %[c3]"
        : [c0] "+x"(c0), [c1] "+x"(c1), [c2] "+x"(c2), [c3] "+x"(c3), [t] "=&x"(t), [u] "=&x"(u)
        : [a] "r"(a), [o] "i"(offset), [b0] "x"(b0), [b1] "x"(b1), [b2] "m"(more[0]), [b3] "m"(more[1]),
          "m"(asm_input<offset + 4>(a)));
}

// Adds the products of all rows with one pair of b.
template <bool wide, int pair, int... r, std::size_t rows = sizeof...(r)>
FQVIT_INLINE void add_pairs(__m256i (&c0)[rows], __m256i (&c1)[rows], __m256i (&c2)[rows], __m256i (&c3)[rows],
                            const std::uint8_t* a, const std::int16_t* b) {
    b += pair * 2 * VALUE_COLUMNS;
    const auto* more = reinterpret_cast<const __m256i*>(b + 2 * HALF_COLUMNS);
    const __m256i b0 = load(b), b1 = load(b + HALF_COLUMNS);
    if constexpr (wide) {
        (add_pair<W_STRIDE * r + 4 * pair>(c0[r], c1[r], c2[r], c3[r], a, b0, b1, more), ...);
    } else {
        (add_pair<W_STRIDE * r + 4 * pair>(c0[r], c1[r], a, b0, b1), ...);
    }
}

// The micro-kernel: out[r][c] = sum over pairs of a[r] * b[c], added to out if `adds`. b: i16 [pairs][32][2]
// wide: 32 columns, not 16
template <bool wide, int... r>
FQVIT_INLINE void multiply_rows(std::integer_sequence<int, r...>, const std::uint8_t* a, const std::int16_t* b,
                                std::int64_t pairs, bool adds, std::int32_t* out) {
    const auto start = [&](int at) FQVIT_AVX2 { return adds ? load(out + at) : _mm256_setzero_si256(); };
    __m256i c0[] = {start(VALUE_COLUMNS * r)...}, c1[] = {start(VALUE_COLUMNS * r + 8)...};
    __m256i c2[] = {start(VALUE_COLUMNS * r + 16)...}, c3[] = {start(VALUE_COLUMNS * r + 24)...};
    for (; pairs >= 2; pairs -= 2, a += 8, b += 4 * VALUE_COLUMNS) {
        add_pairs<wide, 0, r...>(c0, c1, c2, c3, a, b);
        add_pairs<wide, 1, r...>(c0, c1, c2, c3, a, b);
    }
    if (pairs > 0) add_pairs<wide, 0, r...>(c0, c1, c2, c3, a, b);
    ((store(out + VALUE_COLUMNS * r, c0[r]), store(out + VALUE_COLUMNS * r + 8, c1[r])), ...);
    if constexpr (wide) {
        ((store(out + VALUE_COLUMNS * r + 16, c2[r]), store(out + VALUE_COLUMNS * r + 24, c3[r])), ...);
    }
}

template <bool wide, int rows>
FQVIT_AVX2 void multiply_values(const std::uint8_t* a, const std::int16_t* b, std::int64_t pairs, bool adds,
                                std::int32_t* out) {
    multiply_rows<wide>(std::make_integer_sequence<int, rows>(), a, b, pairs, adds, out);
}

using ValueKernel = void (*)(const std::uint8_t*, const std::int16_t*, std::int64_t, bool, std::int32_t*);
// By whether there are more than 16 columns, and by number of rows.
constexpr ValueKernel MULTIPLY_VALUES[2][VALUE_ROWS + 1] = {
    {nullptr, multiply_values<false, 1>, multiply_values<false, 2>, multiply_values<false, 3>},
    {nullptr, multiply_values<true, 1>, multiply_values<true, 2>, multiply_values<true, 3>}};

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

// Packs V as i16 [D / 32][T / 2][32][2]. The padding of T is 0.
inline FQVIT_AVX2 void pack_values(const Attention& head, const std::uint8_t* v, std::int16_t* values) {
    const __m256i zero = _mm256_set1_epi16(static_cast<short>(head.v_zero));
    const std::int64_t pairs = (head.tokens + 1) / 2;
    for (std::int64_t c = 0; c < head.value_width; c += HALF_COLUMNS) {
        const std::int64_t count = std::min<std::int64_t>(16, head.value_width - c);
        std::int16_t* out = values + c / VALUE_COLUMNS * VALUE_COLUMNS * 2 * pairs + c % VALUE_COLUMNS * 2;
        for (std::int64_t p = 0; p < pairs; ++p, out += 2 * VALUE_COLUMNS) {
            const __m256i a = load_centered(v + 2 * p * head.v_stride + c, count, zero);
            const __m256i b = 2 * p + 1 < head.tokens ? load_centered(v + (2 * p + 1) * head.v_stride + c, count, zero)
                                                      : _mm256_setzero_si256();
            const __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
            store(out, _mm256_permute2x128_si256(low, high, 0x20));
            store(out + HALF_COLUMNS, _mm256_permute2x128_si256(low, high, 0x31));
        }
    }
}

}  // namespace fqvit::avx2
