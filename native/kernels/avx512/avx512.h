// Named operations on vectors of 512 bits. The kernels in this folder use only these, so that they can be compiled for
// two targets: AVX-512 with F, BW, VL, DQ, IFMA, VBMI and VNNI, and with FQVIT_AVX512_BW (files *_avx512bw.cpp) for
// CPUs without IFMA and VBMI, such as Cascade Lake, whose permutations of bytes and products of 52 bits avx512_bw.h
// composes of other operations. With FQVIT_AVX512_SHIM, both are compiled as plain C++ for tests on any CPU
// (avx512_shim.h). Every operation that is added here must also be added there.
//
// A Vector has no element type: it holds 64 x 8, 32 x 16, 16 x 32 or 8 x 64 bits. Bit i of a mask belongs to element i.
// Only functions with the target attribute are compiled for AVX-512, so that one build runs on every x86-64 CPU.
#pragma once

#include <cstdint>

#ifdef FQVIT_AVX512_SHIM

#include "kernels/avx512/avx512_shim.h"

#else

// GCC 12 warns about a variable of its own header that is uninitialized on purpose (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop

#ifdef FQVIT_AVX512_BW
#define FQVIT_AVX512_NAMESPACE avx512bw
#define FQVIT_AVX512_KERNELS kernels_avx512bw
#define FQVIT_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
#else
#define FQVIT_AVX512_NAMESPACE avx512
#define FQVIT_AVX512_KERNELS kernels_avx512
#define FQVIT_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512ifma,avx512vbmi,avx512vnni")))
#endif
#define FQVIT_AVX512_SHARED avx512bw  // kernels that are compiled once, for both targets
#define FQVIT_INLINE FQVIT_AVX512 __attribute__((always_inline)) inline

namespace fqvit::FQVIT_AVX512_NAMESPACE {

using Vector = __m512i;

constexpr std::uint16_t ALL_16 = 0xffff;
constexpr std::uint32_t ALL_32 = 0xffffffff;

// Memory, at any address. Masked loads read only the elements of the mask and give 0 elsewhere.
FQVIT_INLINE Vector load(const void* p) { return _mm512_loadu_si512(p); }
FQVIT_INLINE void store(void* p, Vector v) { _mm512_storeu_si512(p, v); }
FQVIT_INLINE Vector load_i8(const void* p, std::uint64_t mask) { return _mm512_maskz_loadu_epi8(mask, p); }
FQVIT_INLINE void store_i8(void* p, std::uint64_t mask, Vector v) { _mm512_mask_storeu_epi8(p, mask, v); }
FQVIT_INLINE Vector load_i16(const void* p, std::uint32_t mask) { return _mm512_maskz_loadu_epi16(mask, p); }
FQVIT_INLINE void store_i16(void* p, std::uint32_t mask, Vector v) { _mm512_mask_storeu_epi16(p, mask, v); }
FQVIT_INLINE Vector load_i32(const void* p, std::uint16_t mask) { return _mm512_maskz_loadu_epi32(mask, p); }
FQVIT_INLINE void store_i32(void* p, std::uint16_t mask, Vector v) { _mm512_mask_storeu_epi32(p, mask, v); }
FQVIT_INLINE Vector load_i64(const void* p, std::uint8_t mask) { return _mm512_maskz_loadu_epi64(mask, p); }
// Loads 16 bytes into each lane of 128 bits, from one address per lane. All lanes have the same mask.
FQVIT_INLINE Vector load_lanes(const void* a, const void* b, const void* c, const void* d, std::uint16_t mask) {
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_maskz_loadu_epi8(mask, a)),
                                                _mm_maskz_loadu_epi8(mask, b), 1);
    const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_maskz_loadu_epi8(mask, c)),
                                                 _mm_maskz_loadu_epi8(mask, d), 1);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// 16 elements -> 16 x i32
FQVIT_INLINE Vector load_u8_as_i32(const void* p, std::uint16_t mask) {
    return _mm512_maskz_cvtepu8_epi32(mask, _mm_maskz_loadu_epi8(mask, p));
}
FQVIT_INLINE Vector load_u16_as_i32(const void* p, std::uint16_t mask) {
    return _mm512_maskz_cvtepu16_epi32(mask, _mm256_maskz_loadu_epi16(mask, p));
}
FQVIT_INLINE Vector load_i16_as_i32(const void* p, std::uint16_t mask) {
    return _mm512_maskz_cvtepi16_epi32(mask, _mm256_maskz_loadu_epi16(mask, p));
}
// 32 x u8 -> 32 x i16
FQVIT_INLINE Vector load_u8_as_i16(const void* p, std::uint32_t mask) {
    return _mm512_maskz_cvtepu8_epi16(mask, _mm256_maskz_loadu_epi8(mask, p));
}
// 16 x u32 -> 16 elements, saturated
FQVIT_INLINE void store_u32_as_u8(void* p, std::uint16_t mask, Vector v) {
    _mm512_mask_cvtusepi32_storeu_epi8(p, mask, v);
}
FQVIT_INLINE void store_u32_as_u16(void* p, std::uint16_t mask, Vector v) {
    _mm512_mask_cvtusepi32_storeu_epi16(p, mask, v);
}
// 32 x u16 below 256 -> 32 x u8
FQVIT_INLINE void store_i16_as_u8(void* p, std::uint32_t mask, Vector v) {
    _mm512_mask_cvtepi16_storeu_epi8(p, mask, v);
}
// The low 16 or 32 bytes.
FQVIT_INLINE void store_16_bytes(void* p, Vector v) {
    _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_castsi512_si128(v));
}
FQVIT_INLINE void store_32_bytes(void* p, Vector v) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_castsi512_si256(v));
}
FQVIT_INLINE void store_upper_32_bytes(void* p, Vector v) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_extracti64x4_epi64(v, 1));
}

// All elements have the same value.
FQVIT_INLINE Vector zero() { return _mm512_setzero_si512(); }
FQVIT_INLINE Vector set_i8(std::int32_t x) { return _mm512_set1_epi8(static_cast<char>(x)); }
FQVIT_INLINE Vector set_i16(std::int32_t x) { return _mm512_set1_epi16(static_cast<short>(x)); }
FQVIT_INLINE Vector set_i32(std::int32_t x) { return _mm512_set1_epi32(x); }
FQVIT_INLINE Vector set_i64(std::int64_t x) { return _mm512_set1_epi64(x); }
// Four bytes from memory, repeated 16 times.
FQVIT_INLINE Vector broadcast_i32(const void* p) {
    std::int32_t x;
    __builtin_memcpy(&x, p, 4);
    return _mm512_set1_epi32(x);
}

// Sums and differences wrap around.
FQVIT_INLINE Vector add_i8(Vector a, Vector b) { return _mm512_add_epi8(a, b); }
FQVIT_INLINE Vector add_i16(Vector a, Vector b) { return _mm512_add_epi16(a, b); }
FQVIT_INLINE Vector add_i32(Vector a, Vector b) { return _mm512_add_epi32(a, b); }
FQVIT_INLINE Vector add_i64(Vector a, Vector b) { return _mm512_add_epi64(a, b); }
FQVIT_INLINE Vector sub_i8(Vector a, Vector b) { return _mm512_sub_epi8(a, b); }
FQVIT_INLINE Vector sub_i16(Vector a, Vector b) { return _mm512_sub_epi16(a, b); }
FQVIT_INLINE Vector sub_i32(Vector a, Vector b) { return _mm512_sub_epi32(a, b); }
FQVIT_INLINE Vector sub_i64(Vector a, Vector b) { return _mm512_sub_epi64(a, b); }

// Products. mul_i16, mul_i32, mul_i64: low halves. mul_even: full 64-bit products of the even i32 elements.
FQVIT_INLINE Vector mul_i16(Vector a, Vector b) { return _mm512_mullo_epi16(a, b); }
FQVIT_INLINE Vector mul_i32(Vector a, Vector b) { return _mm512_mullo_epi32(a, b); }
FQVIT_INLINE Vector mul_i64(Vector a, Vector b) { return _mm512_mullo_epi64(a, b); }
FQVIT_INLINE Vector mul_even(Vector a, Vector b) { return _mm512_mul_epi32(a, b); }
// Sums of two adjacent i16 products.
FQVIT_INLINE Vector madd_i16(Vector a, Vector b) { return _mm512_madd_epi16(a, b); }
// acc + sum of four products u8 x i8 (dpbusd) or of two products i16 x i16 (dpwssd); wraps around.
FQVIT_INLINE Vector dpbusd(Vector acc, Vector u8, Vector i8) { return _mm512_dpbusd_epi32(acc, u8, i8); }
// The same in assembly, for micro-kernels: GCC 12 copies and spills the accumulators of the intrinsic in loops.
FQVIT_INLINE void add_dpbusd(Vector& acc, Vector u8, Vector i8) {
    asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(u8), "v"(i8));
}
FQVIT_INLINE Vector dpwssd(Vector acc, Vector a, Vector b) { return _mm512_dpwssd_epi32(acc, a, b); }

#ifndef FQVIT_AVX512_BW
// acc + the low 52 bits of the product of the low 52 bits of a and b, as 8 x u64; wraps around.
FQVIT_INLINE Vector madd52(Vector acc, Vector a, Vector b) { return _mm512_madd52lo_epu64(acc, a, b); }
#endif

// Bits.
FQVIT_INLINE Vector and_bits(Vector a, Vector b) { return _mm512_and_si512(a, b); }
FQVIT_INLINE Vector or_bits(Vector a, Vector b) { return _mm512_or_si512(a, b); }
FQVIT_INLINE Vector xor_bits(Vector a, Vector b) { return _mm512_xor_si512(a, b); }

// Shifts by one count for all elements, or (..._each_...) by one count per element. Counts are at least 0 and less than
// the number of bits of an element. sar: arithmetic, shr: logical.
FQVIT_INLINE Vector shl_i16(Vector a, unsigned n) { return _mm512_slli_epi16(a, n); }
FQVIT_INLINE Vector shl_i32(Vector a, unsigned n) { return _mm512_slli_epi32(a, n); }
FQVIT_INLINE Vector shl_i64(Vector a, unsigned n) { return _mm512_slli_epi64(a, n); }
FQVIT_INLINE Vector shr_i16(Vector a, unsigned n) { return _mm512_srli_epi16(a, n); }
FQVIT_INLINE Vector shr_i32(Vector a, unsigned n) { return _mm512_srli_epi32(a, n); }
FQVIT_INLINE Vector shr_i64(Vector a, unsigned n) { return _mm512_srli_epi64(a, n); }
FQVIT_INLINE Vector sar_i16(Vector a, unsigned n) { return _mm512_srai_epi16(a, n); }
FQVIT_INLINE Vector sar_i32(Vector a, unsigned n) { return _mm512_srai_epi32(a, n); }
FQVIT_INLINE Vector sar_i64(Vector a, unsigned n) { return _mm512_srai_epi64(a, n); }
// Only shl_each_i32 also accepts larger counts, which give 0.
FQVIT_INLINE Vector shl_each_i32(Vector a, Vector n) { return _mm512_sllv_epi32(a, n); }
FQVIT_INLINE Vector shl_each_i64(Vector a, Vector n) { return _mm512_sllv_epi64(a, n); }
FQVIT_INLINE Vector sar_each_i32(Vector a, Vector n) { return _mm512_srav_epi32(a, n); }
FQVIT_INLINE Vector sar_each_i64(Vector a, Vector n) { return _mm512_srav_epi64(a, n); }
FQVIT_INLINE Vector shr_each_i16(Vector a, Vector n) { return _mm512_srlv_epi16(a, n); }
FQVIT_INLINE Vector shr_each_i64(Vector a, Vector n) { return _mm512_srlv_epi64(a, n); }

// Minimum and maximum.
FQVIT_INLINE Vector min_i32(Vector a, Vector b) { return _mm512_min_epi32(a, b); }
FQVIT_INLINE Vector max_i32(Vector a, Vector b) { return _mm512_max_epi32(a, b); }
FQVIT_INLINE Vector min_u8(Vector a, Vector b) { return _mm512_min_epu8(a, b); }
FQVIT_INLINE Vector max_u8(Vector a, Vector b) { return _mm512_max_epu8(a, b); }
FQVIT_INLINE Vector min_u16(Vector a, Vector b) { return _mm512_min_epu16(a, b); }
FQVIT_INLINE Vector max_u16(Vector a, Vector b) { return _mm512_max_epu16(a, b); }
FQVIT_INLINE Vector max_u32(Vector a, Vector b) { return _mm512_max_epu32(a, b); }

// Comparisons and selection: element of b where the mask is set, else of a.
FQVIT_INLINE std::uint64_t equal_i8(Vector a, Vector b) { return _mm512_cmpeq_epi8_mask(a, b); }
FQVIT_INLINE std::uint16_t equal_i32(Vector a, Vector b) { return _mm512_cmpeq_epi32_mask(a, b); }
FQVIT_INLINE std::uint16_t greater_i32(Vector a, Vector b) { return _mm512_cmpgt_epi32_mask(a, b); }
FQVIT_INLINE std::uint64_t nonzero_i8(Vector a) { return _mm512_test_epi8_mask(a, a); }
FQVIT_INLINE std::uint16_t greater_u32(Vector a, Vector b) { return _mm512_cmpgt_epu32_mask(a, b); }
FQVIT_INLINE std::uint8_t greater_i64(Vector a, Vector b) { return _mm512_cmpgt_epi64_mask(a, b); }
FQVIT_INLINE std::uint64_t top_bits_i8(Vector a) { return _mm512_movepi8_mask(a); }
// Whether a and b have a common bit.
FQVIT_INLINE std::uint64_t test_i8(Vector a, Vector b) { return _mm512_test_epi8_mask(a, b); }
FQVIT_INLINE std::uint32_t test_i16(Vector a, Vector b) { return _mm512_test_epi16_mask(a, b); }
FQVIT_INLINE Vector select_i8(std::uint64_t mask, Vector a, Vector b) { return _mm512_mask_blend_epi8(mask, a, b); }
FQVIT_INLINE Vector select_i16(std::uint32_t mask, Vector a, Vector b) { return _mm512_mask_blend_epi16(mask, a, b); }
FQVIT_INLINE Vector select_i32(std::uint16_t mask, Vector a, Vector b) { return _mm512_mask_blend_epi32(mask, a, b); }
FQVIT_INLINE Vector select_i64(std::uint8_t mask, Vector a, Vector b) { return _mm512_mask_blend_epi64(mask, a, b); }

// The high halves of two vectors of 8 x i64, as 16 x i32: even elements from `even`, odd elements from `odd`.
FQVIT_INLINE Vector high_halves(Vector even, Vector odd) {
    return _mm512_mask_shuffle_epi32(odd, 0x5555, even, _MM_PERM_CDAB);
}

// Permutations: element i is table[index[i]], where only the low bits of an index count. The table of permute2_... is
// two vectors, `low` and then `high`.
#ifndef FQVIT_AVX512_BW
FQVIT_INLINE Vector permute_i8(Vector index, Vector table) { return _mm512_permutexvar_epi8(index, table); }
FQVIT_INLINE Vector permute2_i8(Vector low, Vector index, Vector high) {
    return _mm512_permutex2var_epi8(low, index, high);
}
#endif
FQVIT_INLINE Vector permute_i16(Vector index, Vector table) { return _mm512_permutexvar_epi16(index, table); }
FQVIT_INLINE Vector permute_i16(std::uint32_t mask, Vector index, Vector table) {
    return _mm512_maskz_permutexvar_epi16(mask, index, table);
}
FQVIT_INLINE Vector permute_i32(Vector index, Vector table) { return _mm512_permutexvar_epi32(index, table); }
FQVIT_INLINE Vector permute_i64(Vector index, Vector table) { return _mm512_permutexvar_epi64(index, table); }
FQVIT_INLINE Vector permute2_i16(Vector low, Vector index, Vector high) {
    return _mm512_permutex2var_epi16(low, index, high);
}
FQVIT_INLINE Vector permute2_i32(Vector low, Vector index, Vector high) {
    return _mm512_permutex2var_epi32(low, index, high);
}

// Within each lane of 128 bits: element i is table[index[i] % 16], or 0 if the top bit of index[i] is set.
FQVIT_INLINE Vector shuffle_i8(Vector index, Vector table) { return _mm512_shuffle_epi8(table, index); }

// Within each lane of 128 bits: packs a, then b, saturated; interleaves the low or the high halves of a and b.
FQVIT_INLINE Vector pack_i32_as_i16(Vector a, Vector b) { return _mm512_packs_epi32(a, b); }
FQVIT_INLINE Vector pack_i32_as_u16(Vector a, Vector b) { return _mm512_packus_epi32(a, b); }
FQVIT_INLINE Vector pack_i16_as_u8(Vector a, Vector b) { return _mm512_packus_epi16(a, b); }
FQVIT_INLINE Vector interleave_low_i8(Vector a, Vector b) { return _mm512_unpacklo_epi8(a, b); }
FQVIT_INLINE Vector interleave_high_i8(Vector a, Vector b) { return _mm512_unpackhi_epi8(a, b); }
FQVIT_INLINE Vector interleave_low_i16(Vector a, Vector b) { return _mm512_unpacklo_epi16(a, b); }
FQVIT_INLINE Vector interleave_high_i16(Vector a, Vector b) { return _mm512_unpackhi_epi16(a, b); }
FQVIT_INLINE Vector interleave_low_i32(Vector a, Vector b) { return _mm512_unpacklo_epi32(a, b); }
FQVIT_INLINE Vector interleave_high_i32(Vector a, Vector b) { return _mm512_unpackhi_epi32(a, b); }
FQVIT_INLINE Vector interleave_low_i64(Vector a, Vector b) { return _mm512_unpacklo_epi64(a, b); }
FQVIT_INLINE Vector interleave_high_i64(Vector a, Vector b) { return _mm512_unpackhi_epi64(a, b); }

// Four lanes of 128 bits: two of a, then two of b, chosen by `lanes` (two bits each), which must be a constant.
#define FQVIT_SHUFFLE_LANES(a, b, lanes) _mm512_shuffle_i64x2(a, b, lanes)

// Sum of 8 x i64, wrapping.
FQVIT_INLINE std::int64_t sum_i64(Vector v) { return _mm512_reduce_add_epi64(v); }
FQVIT_INLINE std::int32_t sum_i32(Vector v) { return _mm512_reduce_add_epi32(v); }
FQVIT_INLINE std::uint8_t largest_u8(Vector v) {
    const __m256i half = _mm256_max_epu8(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
    __m128i m = _mm_max_epu8(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    m = _mm_max_epu8(m, _mm_srli_si128(m, 8));
    m = _mm_max_epu8(m, _mm_srli_si128(m, 4));
    m = _mm_max_epu8(m, _mm_srli_si128(m, 2));
    m = _mm_max_epu8(m, _mm_srli_si128(m, 1));
    return static_cast<std::uint8_t>(_mm_cvtsi128_si32(m));
}

}  // namespace fqvit::FQVIT_AVX512_NAMESPACE

#endif

#ifdef FQVIT_AVX512_BW
#include "kernels/avx512/avx512_bw.h"
#else
#include "kernels/avx512/avx512_vbmi.h"
#endif

namespace fqvit::FQVIT_AVX512_NAMESPACE {

// Masks of the first `count` elements, or of all elements if there are fewer.
constexpr std::uint64_t first_64(std::int64_t count) {
    return count >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1;
}
constexpr std::uint32_t first_32(std::int64_t count) { return static_cast<std::uint32_t>(first_64(count)); }
constexpr std::uint16_t first_16(std::int64_t count) { return static_cast<std::uint16_t>(first_64(count)); }
constexpr std::uint8_t first_8(std::int64_t count) { return static_cast<std::uint8_t>(first_64(count)); }

}  // namespace fqvit::FQVIT_AVX512_NAMESPACE
