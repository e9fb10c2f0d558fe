// LayerNorm with AVX2, 8 channels x i32 per vector. kernels.h has the formulas.
//
// Exact because vpmuldq multiplies i32 to full 64-bit products and the ops prove that every sum fits in 63 bits. The
// scalar kernel handles parameters that the vector code does not support.
#include "kernels/avx2/layernorm_avx2.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include "core/fixed.h"
#include "kernels/avx2/avx2.h"
#include "kernels/norm_row.h"

namespace fqvit {
namespace {

using namespace avx2;

constexpr int LANES = 8;

// (x - zero) * 2^alpha of 8 channels, as i32
FQVIT_INLINE __m256i shifted_codes(const Norm& norm, const void* x, std::int64_t at, std::int64_t c) {
    const __m256i codes = norm.wide_in ? from_u16(static_cast<const std::uint16_t*>(x) + at)
                                       : from_u8(static_cast<const std::uint8_t*>(x) + at);
    return _mm256_sllv_epi32(_mm256_sub_epi32(codes, load(norm.zero + c)), load(norm.alpha + c));
}

FQVIT_INLINE std::int64_t sum_of(__m256i v) {
    const __m128i both = _mm_add_epi64(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    return _mm_cvtsi128_si64(both) + _mm_extract_epi64(both, 1);
}

// t * g + b of four channels as i64, with t = round(n * 2^s / d) exactly.
// The estimate q = round(n * rho / 2^(61 - s)) with rho = floor(2^61 / d) differs from t by at most 1, because
// |t| < 2^30. The remainder n * 2^s - q * d, computed modulo 2^64, shows how to correct q.
struct Divider {
    __m256i rho, bias, unbias, d_less_1, d, d_half;
    __m128i shift_right, shift_left;  // 61 - s, s

    FQVIT_INLINE __m256i operator()(__m128i four, const std::int32_t* g_at, const std::int64_t* b_at) const {
        const __m256i n = _mm256_cvtepi32_epi64(four), b = load(b_at);
        const __m256i g = _mm256_cvtepi32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(g_at)));
        // AVX2 has no arithmetic shift of i64: add 2^62, shift, subtract it again. `bias` also rounds.
        const __m256i biased = _mm256_add_epi64(_mm256_mul_epi32(n, rho), bias);
        __m256i q = _mm256_sub_epi64(_mm256_srl_epi64(biased, shift_right), unbias);
        const __m256i rest =
            _mm256_add_epi64(_mm256_sub_epi64(_mm256_sll_epi64(n, shift_left), _mm256_mul_epi32(q, d)), d_half);
        q = _mm256_add_epi64(q, _mm256_cmpgt_epi64(_mm256_setzero_si256(), rest));  // rest < 0: q is 1 too large
        q = _mm256_sub_epi64(q, _mm256_cmpgt_epi64(rest, d_less_1));                // rest >= d: q is 1 too small
        return _mm256_add_epi64(_mm256_mul_epi32(q, g), b);
    }
};

FQVIT_INLINE NormMoments moments(const Norm& norm, const void* x, std::int64_t first) {
    __m256i m1 = _mm256_setzero_si256(), m2 = m1;
    for (std::int64_t c = 0; c < norm.channels; c += LANES) {
        const __m256i v = shifted_codes(norm, x, first + c, c), odd = _mm256_srli_epi64(v, 32);
        m1 = _mm256_add_epi32(m1, v);  // fits in i32: C * |v| < 2^31
        m2 = _mm256_add_epi64(m2, _mm256_add_epi64(_mm256_mul_epi32(v, v), _mm256_mul_epi32(odd, odd)));
    }
    const __m256i wide = _mm256_add_epi64(_mm256_cvtepi32_epi64(_mm256_castsi256_si128(m1)),
                                          _mm256_cvtepi32_epi64(_mm256_extracti128_si256(m1, 1)));
    return {norm.center ? sum_of(wide) : 0, sum_of(m2)};
}

// 16 codes minus the offset, as i16.
FQVIT_INLINE __m256i offset_codes(const Norm& norm, const void* x, std::int64_t at) {
    const __m256i codes =
        norm.wide_in ? load(static_cast<const std::uint16_t*>(x) + at)
                     : _mm256_cvtepu8_epi16(
                           _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const std::uint8_t*>(x) + at)));
    return _mm256_sub_epi16(codes, _mm256_set1_epi16(norm.offset));
}

FQVIT_INLINE NormMoments per_tensor_moments(const Norm& norm, const void* x, std::int64_t first) {
    const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi64x(0xffffffff);
    __m256i m1 = _mm256_setzero_si256(), even = m1, odd = m1;
    for (std::int64_t c = 0; c < norm.channels; c += 2 * LANES) {
        const __m256i v = offset_codes(norm, x, first + c);
        const __m256i squares = _mm256_madd_epi16(v, v);  // sums of two squares: at most 2^31, read as unsigned
        m1 = _mm256_add_epi32(m1, _mm256_madd_epi16(v, ones));
        even = _mm256_add_epi64(even, _mm256_and_si256(squares, low));
        odd = _mm256_add_epi64(odd, _mm256_srli_epi64(squares, 32));
    }
    const __m256i wide = _mm256_add_epi64(_mm256_cvtepi32_epi64(_mm256_castsi256_si128(m1)),
                                          _mm256_cvtepi32_epi64(_mm256_extracti128_si256(m1, 1)));
    return {norm.center ? sum_of(wide) : 0, sum_of(_mm256_add_epi64(even, odd))};
}

FQVIT_INLINE Divider make_divider(const NormScale& row) {
    const int s = 24 + row.j, k = 61 - s;
    const std::int64_t top = std::int64_t{1} << 62;  // |n * rho| < 2^62, so the sum is not negative and does not wrap
    Divider divide;
    divide.rho = _mm256_set1_epi64x(row.rho);
    divide.bias = _mm256_set1_epi64x(top + (std::int64_t{1} << (k - 1)));
    divide.unbias = _mm256_set1_epi64x(top >> k);
    divide.d_less_1 = _mm256_set1_epi64x(row.d - 1);
    divide.d = _mm256_set1_epi64x(row.d);
    divide.d_half = _mm256_set1_epi64x(row.d / 2);
    divide.shift_right = _mm_cvtsi32_si128(k), divide.shift_left = _mm_cvtsi32_si128(s);
    return divide;
}

// Stores exact results.
struct ExactStore {
    const Norm& norm;
    Divider divide;

    FQVIT_INLINE void operator()(__m256i n, std::int64_t c, void* y, std::int64_t at) const {
        const __m256i low = divide(_mm256_castsi256_si128(n), norm.g + c, norm.b + c);
        const __m256i high = divide(_mm256_extracti128_si256(n, 1), norm.g + c + 4, norm.b + c + 4);
        // high_halves interleaves channels 0..3 with 4..7; the permutation restores their order.
        const __m256i ordered =
            _mm256_permutevar8x32_epi32(high_halves(low, high), _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
        store_codes(_mm256_sra_epi32(ordered, _mm_cvtsi32_si128(norm.shift - 32)), static_cast<std::int32_t>(norm.last),
                    norm.wide_out, y, at);
    }

    FQVIT_INLINE void operator()(__m256i left, __m256i right, std::int64_t c, void* y, std::int64_t at) const {
        (*this)(left, c, y, at);
        (*this)(right, c + LANES, y, at + LANES);
    }
};

// Stores the results for the lower bound of t * g + b in quick_norm.h, and records whether the upper bound gives
// different results.
struct QuickStore {
    const Norm& norm;
    __m256i rho, doubt = _mm256_setzero_si256();
    __m128i left, right, shift;  // n' = n * 2^left / 2^right

    FQVIT_AVX2 QuickStore(const Norm& n, const NormScale& row)
        : norm(n),
          rho(_mm256_set1_epi64x(row.rho)),
          left(_mm_cvtsi32_si128(row.j > 6 ? row.j - 6 : 0)),
          right(_mm_cvtsi32_si128(row.j < 6 ? 6 - row.j : 0)),
          shift(_mm_cvtsi32_si128(n.quick_shift)) {}

    // The results of 8 channels, not clamped.
    FQVIT_INLINE __m256i codes(__m256i n, std::int64_t c) {
        const __m256i scaled = _mm256_sra_epi32(_mm256_sll_epi32(n, left), right), g = load(norm.quick_g + c);
        const __m256i even = _mm256_srli_epi64(_mm256_mul_epi32(scaled, rho), 32);
        const __m256i odd = _mm256_srli_epi64(_mm256_mul_epi32(_mm256_srli_epi64(scaled, 32), rho), 32);
        const std::int64_t* b = norm.quick_b + (c - c % 16 / 2);
        const __m256i low = _mm256_add_epi64(_mm256_mul_epi32(even, g), load(b));
        const __m256i high = _mm256_add_epi64(_mm256_mul_epi32(odd, _mm256_srli_epi64(g, 32)), load(b + 8));
        const __m256i halves = _mm256_blend_epi32(_mm256_srli_epi64(low, 32), high, 0xaa);
        const __m256i code = _mm256_sra_epi32(halves, shift);
        const __m256i above = _mm256_sra_epi32(_mm256_add_epi32(halves, _mm256_set1_epi32(1)), shift);
        doubt = _mm256_or_si256(doubt, _mm256_xor_si256(code, above));
        return code;
    }

    FQVIT_INLINE void operator()(__m256i n, std::int64_t c, void* y, std::int64_t at) {
        store_codes(codes(n, c), static_cast<std::int32_t>(norm.last), norm.wide_out, y, at);
    }

    // The same for 16 channels. u8 codes are saturated and stored together.
    FQVIT_INLINE void operator()(__m256i left, __m256i right, std::int64_t c, void* y, std::int64_t at) {
        if (norm.wide_out) {
            (*this)(left, c, y, at);
            (*this)(right, c + LANES, y, at + LANES);
            return;
        }
        const __m256i words = _mm256_packs_epi32(codes(left, c), codes(right, c + LANES));
        const __m256i bytes = _mm256_packus_epi16(words, words);
        const __m256i ordered = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5));
        const __m128i last = _mm_set1_epi8(static_cast<char>(norm.last));
        auto* out = reinterpret_cast<__m128i*>(static_cast<std::uint8_t*>(y) + at);
        _mm_storeu_si128(out, _mm_min_epu8(_mm256_castsi256_si128(ordered), last));
    }
};

// Calls store with n = C * v - M1 of 8 or 16 channels at a time.
template <class Store>
FQVIT_INLINE void normalize(const Norm& norm, const NormScale& row, const void* x, void* y, std::int64_t first,
                            Store&& store) {
    const __m256i count = _mm256_set1_epi32(static_cast<int>(norm.channels));
    const __m256i sum = _mm256_set1_epi32(static_cast<int>(row.sum));
    if (!norm.per_tensor) {
        for (std::int64_t c = 0; c < norm.channels; c += LANES) {
            const __m256i v = shifted_codes(norm, x, first + c, c);
            store(_mm256_sub_epi32(_mm256_mullo_epi32(v, count), sum), c, y, first + c);
        }
        return;
    }
    for (std::int64_t c = 0; c < norm.channels; c += 2 * LANES) {
        const __m256i v = offset_codes(norm, x, first + c);
        // C < 2^15, so vpmaddwd multiplies the low 16 bits of each lane by C.
        const __m256i left = _mm256_madd_epi16(_mm256_cvtepi16_epi32(_mm256_castsi256_si128(v)), count);
        const __m256i right = _mm256_madd_epi16(_mm256_cvtepi16_epi32(_mm256_extracti128_si256(v, 1)), count);
        const __m256i n_left = _mm256_sub_epi32(left, sum), n_right = _mm256_sub_epi32(right, sum);
        store(n_left, n_right, c, y, first + c);
    }
}

FQVIT_AVX2 void layernorm_row(const Norm& norm, const NormScale& row, const void* x, void* y, std::int64_t first) {
    const ExactStore store = {norm, make_divider(row)};
    normalize(norm, row, x, y, first, store);
}

// Returns whether the results are exact.
FQVIT_AVX2 bool layernorm_row_quickly(const Norm& norm, const NormScale& row, const void* x, void* y,
                                      std::int64_t first) {
    QuickStore store(norm, row);
    normalize(norm, row, x, y, first, store);
    return _mm256_testz_si256(store.doubt, store.doubt) != 0;
}

}  // namespace

FQVIT_AVX2 void layernorm_avx2(const Norm& norm, const void* x, void* y, std::int64_t rows) {
    if (!norm.fits_i32 || norm.channels % LANES != 0) {
        kernels_scalar()->layernorm(norm, x, y, rows);
        return;
    }
    // Square roots and divisions of several rows overlap, which hides their latency.
    constexpr std::int64_t GROUP = 8;
    for (std::int64_t r = 0; r < rows; r += GROUP) {
        NormScale scales[GROUP];
        const std::int64_t count = rows - r < GROUP ? rows - r : GROUP;
        for (std::int64_t i = 0; i < count; ++i) {
            const std::int64_t first = (r + i) * norm.channels;
            scales[i] =
                norm_scale(norm, norm.per_tensor ? per_tensor_moments(norm, x, first) : moments(norm, x, first));
        }
        for (std::int64_t i = 0; i < count; ++i) {
            const std::int64_t first = (r + i) * norm.channels;
            if (norm.quick_g != nullptr && layernorm_row_quickly(norm, scales[i], x, y, first)) continue;
            layernorm_row(norm, scales[i], x, y, first);
        }
    }
}

}  // namespace fqvit

#endif
