// Helpers shared by the AVX2 kernels. Only functions with the target attribute are compiled for AVX2, so that one build
// runs on every x86-64 CPU.
#pragma once

#include <immintrin.h>

#include <cstdint>

#define FQVIT_AVX2 __attribute__((target("avx2")))
#define FQVIT_INLINE __attribute__((target("avx2"), always_inline)) inline

namespace fqvit::avx2 {

FQVIT_INLINE __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
FQVIT_INLINE void store(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }

// Declares the first `bytes` bytes at p as an input of inline assembly. Without this, a compiler may move stores to
// these bytes past the assembly.
template <int bytes>
FQVIT_INLINE const std::uint8_t (&asm_input(const std::uint8_t* p))[bytes] {
    return *reinterpret_cast<const std::uint8_t(*)[bytes]>(p);
}

// Stores the upper 8 bytes to any address. (_mm_storeh_pd takes a double*, which must be aligned.)
FQVIT_INLINE void store_upper(void* p, __m128i v) {
    _mm_storel_epi64(static_cast<__m128i*>(p), _mm_unpackhi_epi64(v, v));
}

// Interleaves the high halves of two vectors of 4 x i64: even lanes of the result from `even`, odd lanes from `odd`.
FQVIT_INLINE __m256i high_halves(__m256i even, __m256i odd) {
    return _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
}
// The same with the low halves.
FQVIT_INLINE __m256i low_halves(__m256i even, __m256i odd) {
    return _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
}

// round_shift(acc * mult, shift) of 8 lanes for shift >= 32: the high half of the rounded 64-bit product, shifted right
// by shift - 32. vpmuldq multiplies even lanes only, so odd lanes are moved down and have a separate rounding term.
struct RequantizeHigh {
    __m256i mult, mult_odd, half_even, half_odd, shift;

    FQVIT_INLINE __m256i operator()(__m256i acc) const {
        const __m256i even = _mm256_add_epi64(_mm256_mul_epi32(acc, mult), half_even);
        const __m256i odd = _mm256_add_epi64(_mm256_mul_epi32(_mm256_srli_epi64(acc, 32), mult_odd), half_odd);
        return _mm256_srav_epi32(high_halves(even, odd), shift);
    }

    // One multiplier and one shift >= 32 for all lanes.
    FQVIT_INLINE static RequantizeHigh per_tensor(std::int64_t mult, int shift) {
        const __m256i m = _mm256_set1_epi32(static_cast<int>(mult));
        const __m256i half = _mm256_set1_epi64x(std::int64_t{1} << (shift - 1));
        return {m, m, half, half, _mm256_set1_epi32(shift - 32)};
    }
};

// 8 x i32 -> 8 x u8 in the lower 8 bytes, saturated.
FQVIT_INLINE __m128i to_u8(__m256i v) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    return _mm_packus_epi16(words, words);
}
// 8 x i32 -> 8 x u16, saturated.
FQVIT_INLINE __m128i to_u16(__m256i v) {
    return _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
}

// Saturates 8 codes to 0..last and stores them.
FQVIT_INLINE void store_codes(__m256i code, std::int32_t last, bool wide, void* y, std::int64_t at) {
    const __m256i clamped = _mm256_min_epi32(_mm256_max_epi32(code, _mm256_setzero_si256()), _mm256_set1_epi32(last));
    if (wide) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<std::uint16_t*>(y) + at), to_u16(clamped));
    } else {
        _mm_storel_epi64(reinterpret_cast<__m128i*>(static_cast<std::uint8_t*>(y) + at), to_u8(clamped));
    }
}

// 8 codes -> 8 x i32
FQVIT_INLINE __m256i from_u8(const std::uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
FQVIT_INLINE __m256i from_u16(const std::uint16_t* p) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// Returns the largest byte.
FQVIT_INLINE std::uint8_t maximum(__m256i v) {
    __m128i m = _mm_max_epu8(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    m = _mm_max_epu8(m, _mm_srli_si128(m, 8));
    m = _mm_max_epu8(m, _mm_srli_si128(m, 4));
    m = _mm_max_epu8(m, _mm_srli_si128(m, 2));
    m = _mm_max_epu8(m, _mm_srli_si128(m, 1));
    return static_cast<std::uint8_t>(_mm_cvtsi128_si32(m));
}

// Transposes an 8 x 8 matrix of 32-bit elements.
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

}  // namespace fqvit::avx2
