// Multiply, rotary, depthwise, max, mean and add with AVX2, 8 channels x i32 per vector. elementwise.h has the
// formulas.
//
// Exact because the ops prove that every accumulator is below 2^31, and vpmuldq multiplies i32 to full 64-bit products.
// The scalar kernels handle parameters that the vector code does not support. Elements past the last multiple of 8 are
// computed by a vector that overlaps the one before it, which is safe because y never shares memory with an input.
#include "kernels/elementwise.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include "kernels/avx2/avx2.h"

namespace fqvit {
namespace {

using namespace avx2;

constexpr int LANES = 8;

FQVIT_INLINE __m128i load_half(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

template <bool wide>
FQVIT_INLINE __m256i load_codes(const void* x, std::int64_t at) {
    if constexpr (wide) return from_u16(static_cast<const std::uint16_t*>(x) + at);
    return from_u8(static_cast<const std::uint8_t*>(x) + at);
}

// Requantizes and stores 8 accumulators. Products are below 2^62 and rounding terms at most 2^61, so the high half is
// below 2^30 + 2^29, and adding a zero point after the shift cannot overflow.
struct Requantizer {
    RequantizeHigh high;
    __m128i lift;
    __m256i zero;
    std::int32_t last;
    bool wide;

    FQVIT_INLINE static Requantizer of(const TensorRequantization& q) {
        return {RequantizeHigh::per_tensor(q.vector_mult, q.vector_shift), _mm_cvtsi32_si128(q.lift),
                _mm256_set1_epi32(q.zero), q.last, q.wide};
    }

    FQVIT_INLINE void store(__m256i acc, void* y, std::int64_t at) const {
        store_codes(_mm256_add_epi32(high(_mm256_sll_epi32(acc, lift)), zero), last, wide, y, at);
    }
};

template <bool wide_a, bool wide_b>
FQVIT_AVX2 void multiply_vectors(const Product& product, const void* a, const void* b, void* y, std::int64_t count) {
    const Requantizer requantizer = Requantizer::of(product.requantization);
    const __m256i a_zero = _mm256_set1_epi32(product.a_zero), b_zero = _mm256_set1_epi32(product.b_zero);
    for (std::int64_t i = 0;; i = i + LANES > count - LANES ? count - LANES : i + LANES) {
        const __m256i left = _mm256_sub_epi32(load_codes<wide_a>(a, i), a_zero);
        const __m256i right = _mm256_sub_epi32(load_codes<wide_b>(b, i), b_zero);
        requantizer.store(_mm256_mullo_epi32(left, right), y, i);
        if (i + LANES == count) return;
    }
}

FQVIT_AVX2 void multiply(const Product& product, const void* a, const void* b, void* y, std::int64_t count) {
    if (product.requantization.vector_shift == 0 || count < LANES) {
        elementwise_scalar.multiply(product, a, b, y, count);
    } else if (product.wide_a) {
        (product.wide_b ? multiply_vectors<true, true> : multiply_vectors<true, false>)(product, a, b, y, count);
    } else {
        (product.wide_b ? multiply_vectors<false, true> : multiply_vectors<false, false>)(product, a, b, y, count);
    }
}

template <bool wide, bool fits_i16>
FQVIT_AVX2 void rotary_vectors(const Rotation& rotation, const std::int32_t* table, const void* x, void* y) {
    const Requantizer requantizer = Requantizer::of(rotation.requantization);
    const __m256i zero = _mm256_set1_epi32(rotation.zero);
    for (std::int64_t p = 0; p < rotation.period; p += LANES) {
        const __m256i angles = load(table + p), lane = load(rotation.lane + p);
        const std::int64_t distance = rotation.first[p / LANES] - p;
        const __m256i cosine = _mm256_srai_epi32(_mm256_slli_epi32(angles, 16), 16);
        const __m256i sine = _mm256_srai_epi32(angles, 16);
        for (std::int64_t c = p; c < rotation.channels; c += rotation.period) {
            const __m256i own = _mm256_sub_epi32(load_codes<wide>(x, c), zero);
            const __m256i near = _mm256_sub_epi32(load_codes<wide>(x, c + distance), zero);
            const __m256i other = _mm256_permutevar8x32_epi32(near, lane);
            __m256i acc;
            if constexpr (fits_i16) {
                acc = _mm256_madd_epi16(_mm256_blend_epi16(own, _mm256_slli_epi32(other, 16), 0xAA), angles);
            } else {
                acc = _mm256_add_epi32(_mm256_mullo_epi32(own, cosine), _mm256_mullo_epi32(other, sine));
            }
            requantizer.store(acc, y, c);
        }
    }
}

FQVIT_AVX2 void rotary(const Rotation& rotation, const std::int32_t* table, const void* x, void* y) {
    if (rotation.requantization.vector_shift == 0 || !rotation.by_eights) {
        elementwise_scalar.rotary(rotation, table, x, y);
    } else if (rotation.wide_in) {
        (rotation.fits_i16 ? rotary_vectors<true, true> : rotary_vectors<true, false>)(rotation, table, x, y);
    } else {
        (rotation.fits_i16 ? rotary_vectors<false, true> : rotary_vectors<false, false>)(rotation, table, x, y);
    }
}

// Adds two taps of 16 channels: vpmaddwd multiplies the two codes of a channel by their weights and adds the products.
FQVIT_INLINE void add_pair(__m128i even, __m128i odd, const std::int32_t* weights, __m256i (&acc)[2]) {
    const __m256i low = _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(even, odd));
    const __m256i high = _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(even, odd));
    acc[0] = _mm256_add_epi32(acc[0], _mm256_madd_epi16(low, load(weights)));
    acc[1] = _mm256_add_epi32(acc[1], _mm256_madd_epi16(high, load(weights + LANES)));
}

// Computes 8 channels, for u8 or u16 codes.
template <bool wide>
FQVIT_AVX2 void depthwise_eight(const Taps& taps, const std::uint8_t* const* rows, std::int64_t c, std::int32_t* acc) {
    __m256i sum = _mm256_setzero_si256();
    for (std::int64_t pair = 0; pair < taps.pairs; ++pair) {
        const __m256i weights = load(taps.weights + pair * taps.channels + c);
        const __m256i even = load_codes<wide>(rows[2 * pair], c), odd = load_codes<wide>(rows[2 * pair + 1], c);
        if constexpr (wide) {
            const __m256i low = _mm256_srai_epi32(_mm256_slli_epi32(weights, 16), 16);
            sum = _mm256_add_epi32(sum, _mm256_mullo_epi32(even, low));
            sum = _mm256_add_epi32(sum, _mm256_mullo_epi32(odd, _mm256_srai_epi32(weights, 16)));
        } else {
            const __m256i both = _mm256_or_si256(even, _mm256_slli_epi32(odd, 16));
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(both, weights));
        }
    }
    store(acc + c, sum);
}

FQVIT_AVX2 void depthwise(const Taps& taps, const std::uint8_t* const* rows, std::int32_t* acc) {
    const std::int64_t channels = taps.channels;
    if (channels < LANES) {
        elementwise_scalar.depthwise(taps, rows, acc);
        return;
    }
    std::int64_t c = 0;
    if (!taps.wide_in) {
        for (; c + 2 * LANES <= channels; c += 2 * LANES) {
            __m256i sum[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
            for (std::int64_t pair = 0; pair < taps.pairs; ++pair) {
                add_pair(load_half(rows[2 * pair] + c), load_half(rows[2 * pair + 1] + c),
                         taps.weights + pair * channels + c, sum);
            }
            store(acc + c, sum[0]);
            store(acc + c + LANES, sum[1]);
        }
    }
    const auto eight = taps.wide_in ? depthwise_eight<true> : depthwise_eight<false>;
    for (; c + LANES <= channels; c += LANES) eight(taps, rows, c, acc);
    if (c < channels) eight(taps, rows, channels - LANES, acc);
}

// Vectors of 32 bytes; the last one overlaps the one before it.
template <bool wide>
FQVIT_AVX2 void max_vectors(const Rows& rows, const std::uint8_t* x, std::uint8_t* y, std::int64_t count) {
    constexpr std::int64_t SIZE = wide ? 2 : 1, STEP = 32;
    const std::int64_t bytes = count * SIZE, stride = rows.stride * SIZE;
    for (std::int64_t i = 0;; i = i + STEP > bytes - STEP ? bytes - STEP : i + STEP) {
        __m256i most = load(x + i);
        for (std::int64_t r = 1; r < rows.count; ++r) {
            const __m256i code = load(x + r * stride + i);
            most = wide ? _mm256_max_epu16(most, code) : _mm256_max_epu8(most, code);
        }
        store(y + i, most);
        if (i + STEP == bytes) return;
    }
}

FQVIT_AVX2 void max(const Rows& rows, const void* x, void* y, std::int64_t count) {
    const auto* from = static_cast<const std::uint8_t*>(x);
    if (count * (rows.wide_in ? 2 : 1) < 32) {
        elementwise_scalar.max(rows, x, y, count);
    } else {
        (rows.wide_in ? max_vectors<true> : max_vectors<false>)(rows, from, static_cast<std::uint8_t*>(y), count);
    }
}

// A sum of codes may exceed 32 bits and wrap around. The result is exact nevertheless, because it fits in 32 bits after
// the zero points are subtracted.
template <bool wide>
FQVIT_AVX2 void mean_vectors(const Average& average, const void* x, void* y, std::int64_t channel, std::int64_t count) {
    const Requantizer requantizer = Requantizer::of(average.requantization);
    const Rows& rows = average.rows;
    const __m256i n = _mm256_set1_epi32(static_cast<std::int32_t>(rows.count));
    for (std::int64_t c = 0;; c = c + LANES > count - LANES ? count - LANES : c + LANES) {
        __m256i sum = _mm256_setzero_si256();
        for (std::int64_t r = 0; r < rows.count; ++r) {
            sum = _mm256_add_epi32(sum, load_codes<wide>(x, r * rows.stride + c));
        }
        sum = _mm256_sub_epi32(sum, _mm256_mullo_epi32(load(average.zero + channel + c), n));
        requantizer.store(_mm256_sllv_epi32(sum, load(average.alpha + channel + c)), y, c);
        if (c + LANES == count) return;
    }
}

FQVIT_AVX2 void mean(const Average& average, const void* x, void* y, std::int64_t channel, std::int64_t count) {
    if (average.requantization.vector_shift == 0 || count < LANES) {
        elementwise_scalar.mean(average, x, y, channel, count);
    } else {
        (average.rows.wide_in ? mean_vectors<true> : mean_vectors<false>)(average, x, y, channel, count);
    }
}

template <bool wide>
FQVIT_AVX2 void center_vectors(const Centering& centering, const void* x, std::int32_t* acc, std::int64_t channels) {
    for (std::int64_t c = 0;; c = c + LANES > channels - LANES ? channels - LANES : c + LANES) {
        const __m256i centered = _mm256_sub_epi32(load_codes<wide>(x, c), load(centering.zero + c));
        store(acc + c, _mm256_sllv_epi32(centered, load(centering.alpha + c)));
        if (c + LANES == channels) return;
    }
}

FQVIT_AVX2 void center(const Centering& centering, const void* x, std::int32_t* acc, std::int64_t channels) {
    if (channels < LANES) {
        elementwise_scalar.center(centering, x, acc, channels);
    } else {
        (centering.wide_in ? center_vectors<true> : center_vectors<false>)(centering, x, acc, channels);
    }
}

}  // namespace

constexpr ElementwiseKernels elementwise_avx2 = {multiply, rotary, depthwise, max, mean, center};

}  // namespace fqvit

#endif
