// The micro-kernel of gemm_avx2.cpp, which explains the layout of activations and weights.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "kernels/avx2/avx2.h"
#include "kernels/avx2/quads_avx2.h"

namespace fqvit::avx2 {

constexpr int K_BLOCK = 96;     // quads; their cells fit in the L1 cache and their offsets in u16
constexpr int PREFETCH = 1024;  // prefetch distance, in bytes of weights

// acc += two quads of row r. In assembly, because the order of instructions decides the speed and compilers spill
// registers here. a, b: offsets in the block, added by the instruction itself
template <int r>
FQVIT_INLINE void add_double(__m256i& acc, const std::uint8_t* block, std::size_t a, std::size_t b, __m256i wa,
                             __m256i wb, __m256i ones) {
    __m256i t, u;
    asm volatile(
        "vpbroadcastd %c[o](%[block],%[a]), %[t]\n\t"
        "vpmaddubsw %[wa], %[t], %[t]\n\t"
        "vpbroadcastd %c[o](%[block],%[b]), %[u]\n\t"
        "vpmaddubsw %[wb], %[u], %[u]\n\t"
        "vpaddw %[u], %[t], %[t]\n\t"
        "vpmaddwd %[ones], %[t], %[t]\n\t"
        "vpaddd %[t], %[acc], %[acc]"
        : [acc] "+x"(acc), [t] "=&x"(t), [u] "=&x"(u)
        : [block] "r"(block), [a] "r"(a), [b] "r"(b), [o] "i"(CELL * r), [wa] "x"(wa), [wb] "x"(wb), [ones] "x"(ones),
          "m"(asm_input<K_BLOCK * QUAD>(block)));
}

// acc += one quad of row r.
template <int r>
FQVIT_INLINE void add_single(__m256i& acc, const std::uint8_t* a, __m256i wa, __m256i ones) {
    __m256i t;
    asm volatile(
        "vpbroadcastd %c[o](%[a]), %[t]\n\t"
        "vpmaddubsw %[wa], %[t], %[t]\n\t"
        "vpmaddwd %[ones], %[t], %[t]\n\t"
        "vpaddd %[t], %[acc], %[acc]"
        : [acc] "+x"(acc), [t] "=&x"(t)
        : [a] "r"(a), [o] "i"(CELL * r), [wa] "x"(wa), [ones] "x"(ones), "m"(asm_input<CELL * r + 4>(a)));
}

template <int... r>
FQVIT_INLINE void add_doubles(__m256i (&acc)[sizeof...(r)], const std::uint8_t* block, const std::uint16_t* o,
                              const std::int8_t* w, __m256i ones) {
    const __m256i wa = _mm256_load_si256(reinterpret_cast<const __m256i*>(w));
    const __m256i wb = _mm256_load_si256(reinterpret_cast<const __m256i*>(w + 32));
    _mm_prefetch(reinterpret_cast<const char*>(w) + PREFETCH, _MM_HINT_T0);
    (add_double<r>(acc[r], block, o[0], o[1], wa, wb, ones), ...);
}

// acc += three quads of row r.
template <int r>
FQVIT_INLINE void add_triple(__m256i& acc, const std::uint8_t* block, const std::uint16_t* o, const __m256i (&w)[3],
                             __m256i ones) {
    const auto product = [&](int i) FQVIT_AVX2 {
        std::int32_t quad;
        std::memcpy(&quad, block + o[i] + CELL * r, sizeof quad);
        return _mm256_maddubs_epi16(_mm256_set1_epi32(quad), w[i]);
    };
    const __m256i sum = _mm256_add_epi16(_mm256_add_epi16(product(0), product(1)), product(2));
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(sum, ones));
}

template <int... r>
FQVIT_INLINE void add_triples(__m256i (&acc)[sizeof...(r)], const std::uint8_t* block, const std::uint16_t* o,
                              const std::int8_t* w, __m256i ones) {
    // One register more than there are: compilers keep two accumulators in memory, which is faster than reading the
    // third vector of weights once per row.
    const auto* from = reinterpret_cast<const __m256i*>(w);
    const __m256i weights[] = {_mm256_load_si256(from), _mm256_load_si256(from + 1), _mm256_load_si256(from + 2)};
    _mm_prefetch(reinterpret_cast<const char*>(w) + PREFETCH, _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(w) + PREFETCH + 64, _MM_HINT_T0);
    (add_triple<r>(acc[r], block, o, weights, ones), ...);
}

// The micro-kernel. rows: the number of rows to store, either all rows or all but the last.
template <int... r>
FQVIT_INLINE void multiply_rows(std::integer_sequence<int, r...>, const KBlock& k_block, const std::uint8_t* block,
                                const std::uint16_t* o, const std::int8_t* w, const std::int32_t* start, int rows,
                                std::int32_t* out) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i acc[sizeof...(r)];
    if (start == nullptr) {
        ((acc[r] = _mm256_load_si256(reinterpret_cast<const __m256i*>(out + TILE_COLUMNS * r))), ...);
    } else {
        const __m256i first = load(start);
        ((acc[r] = first), ...);
    }
    for (std::uint32_t i = k_block.triples; i > 0; --i, o += 3, w += 96) add_triples<r...>(acc, block, o, w, ones);
    for (std::uint32_t i = k_block.doubles; i > 0; --i, o += 2, w += 64) add_doubles<r...>(acc, block, o, w, ones);
    for (std::uint32_t i = k_block.singles; i > 0; --i, ++o, w += 32) {
        const __m256i wa = _mm256_load_si256(reinterpret_cast<const __m256i*>(w));
        (add_single<r>(acc[r], block + o[0], wa, ones), ...);
    }
    constexpr int LAST = sizeof...(r) - 1;
    ((r < LAST || rows > LAST ? _mm256_store_si256(reinterpret_cast<__m256i*>(out + TILE_COLUMNS * r), acc[r])
                              : (void)0),
     ...);
}

template <int most_rows>
FQVIT_AVX2 void multiply_tile(const KBlock& k_block, const std::uint8_t* block, const std::uint16_t* offsets,
                              const std::int8_t* weights, const std::int32_t* start, int rows, std::int32_t* out) {
    multiply_rows(std::make_integer_sequence<int, most_rows>(), k_block, block, offsets, weights, start, rows, out);
}

}  // namespace fqvit::avx2
