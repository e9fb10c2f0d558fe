// What the AVX2 kernels share. Functions are compiled for AVX2 one by one, so that one build runs on every x86-64 CPU.
#pragma once

#include <immintrin.h>

#include <cstdint>

#define FQVIT_AVX2 __attribute__((target("avx2")))
#define FQVIT_INLINE __attribute__((target("avx2"), always_inline)) inline

namespace fqvit::avx2 {

FQVIT_INLINE __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
FQVIT_INLINE void store(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
// The bytes from p on that assembly reads, as one operand: without it compilers may write them later.
template <int bytes>
FQVIT_INLINE const std::uint8_t (&read_by(const std::uint8_t* p))[bytes] {
    return *reinterpret_cast<const std::uint8_t(*)[bytes]>(p);
}
// The upper 8 bytes, anywhere: _mm_storeh_pd takes a double, which the language wants aligned.
FQVIT_INLINE void store_upper(void* p, __m128i v) {
    _mm_storel_epi64(static_cast<__m128i*>(p), _mm_unpackhi_epi64(v, v));
}

// Even lanes of `even` and odd lanes of `odd`, both i32 in the upper half of 64-bit lanes.
FQVIT_INLINE __m256i upper_halves(__m256i even, __m256i odd) {
    return _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
}
// The same of lower halves.
FQVIT_INLINE __m256i lower_halves(__m256i even, __m256i odd) {
    return _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
}

// round_shift(acc * mult, shift) of 8 lanes, shift >= 32: the product's upper half, shifted on. half: of even lanes, of
// odd ones.
struct High {
    __m256i mult, mult_odd, half_even, half_odd, shift;

    FQVIT_INLINE __m256i operator()(__m256i acc) const {
        const __m256i even = _mm256_add_epi64(_mm256_mul_epi32(acc, mult), half_even);
        const __m256i odd = _mm256_add_epi64(_mm256_mul_epi32(_mm256_srli_epi64(acc, 32), mult_odd), half_odd);
        return _mm256_srav_epi32(upper_halves(even, odd), shift);
    }

    // One multiplier and one shift (>= 32) for all lanes.
    FQVIT_INLINE static High of(std::int64_t mult, int shift) {
        const __m256i m = _mm256_set1_epi32(static_cast<int>(mult)),
                      half = _mm256_set1_epi64x(std::int64_t{1} << (shift - 1));
        return {m, m, half, half, _mm256_set1_epi32(shift - 32)};
    }
};

// 8 x i32 -> 8 codes of 8 bits in the low half, clamped to 0..255 (or of 16 bits, 0..65535).
FQVIT_INLINE __m128i to_u8(__m256i v) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    return _mm_packus_epi16(words, words);
}
FQVIT_INLINE __m128i to_u16(__m256i v) {
    return _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
}

// 8 codes -> 8 x i32
FQVIT_INLINE __m256i from_u8(const std::uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
FQVIT_INLINE __m256i from_u16(const std::uint16_t* p) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

}  // namespace fqvit::avx2
