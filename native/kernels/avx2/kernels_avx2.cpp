// AVX2: what follows a product, and LayerNorm. Whatever does not fit the vector form goes to the scalar kernels.
#include "kernels/kernels.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include "core/fixed.h"
#include "kernels/avx2/attention_avx2.h"
#include "kernels/avx2/avx2.h"

namespace fqvit {
namespace {

using namespace avx2;

constexpr int LANES = 8;

FQVIT_INLINE void put_codes(__m256i code, std::int32_t last, bool wide, void* y, std::int64_t at) {
    const __m256i clamped = _mm256_min_epi32(_mm256_max_epi32(code, _mm256_setzero_si256()), _mm256_set1_epi32(last));
    if (wide) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<std::uint16_t*>(y) + at), to_u16(clamped));
    } else {
        _mm_storel_epi64(reinterpret_cast<__m128i*>(static_cast<std::uint8_t*>(y) + at), to_u8(clamped));
    }
}

// tables[starts[c] + code] of 8 channels. Bytes by scalar loads, which are no slower than a gather.
FQVIT_INLINE void put_looked_up(const Epilogue& e, __m256i at_table, void* y, std::int64_t at) {
    alignas(32) std::uint32_t places[LANES];
    _mm256_store_si256(reinterpret_cast<__m256i*>(places), at_table);
    if (e.wide) {
        for (int i = 0; i < LANES; ++i)
            static_cast<std::uint16_t*>(y)[at + i] = static_cast<const std::uint16_t*>(e.tables)[places[i]];
    } else {
        for (int i = 0; i < LANES; ++i)
            static_cast<std::uint8_t*>(y)[at + i] = static_cast<const std::uint8_t*>(e.tables)[places[i]];
    }
}

// Four rows of 8 codes, clamped to 0..last <= 255.
FQVIT_INLINE void put_four_rows(const __m256i (&code)[4], std::int32_t last, std::uint8_t* y, std::int64_t stride) {
    const __m256i words =
        _mm256_packus_epi16(_mm256_packs_epi32(code[0], code[1]), _mm256_packs_epi32(code[2], code[3]));
    const __m256i bytes = _mm256_min_epu8(words, _mm256_set1_epi8(static_cast<char>(last)));
    const __m256i rows = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    const __m128i low = _mm256_castsi256_si128(rows), high = _mm256_extracti128_si256(rows, 1);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(y), low);
    store_upper(y + stride, low);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(y + 2 * stride), high);
    store_upper(y + 3 * stride, high);
}

// A tile 8 columns wide, all of which exist. Bias and zero points are in vector_half.
FQVIT_AVX2 void finish_rescaled(const Epilogue& e, const Tile& tile, const std::int32_t* acc, std::int64_t channel,
                                void* y) {
    const Rescale& to = e.rescale;
    const __m256i mult = load(to.vector_mult + channel);
    const High rescale = {mult, _mm256_srli_epi64(mult, 32), load(to.vector_half + channel),
                          load(to.vector_half + channel + 4), load(to.vector_shift + channel)};
    const int rows = tile.rows;
    const std::int64_t columns = tile.columns, stride = tile.stride;
    std::int64_t at = tile.row * stride + channel;
    int r = 0;
    if (e.kind == Epilogue::CODES && !e.wide) {
        for (; r + 4 <= rows; r += 4, at += 4 * stride) {
            __m256i code[4];
            for (int i = 0; i < 4; ++i) code[i] = rescale(load(acc + (r + i) * columns));
            put_four_rows(code, to.last, static_cast<std::uint8_t*>(y) + at, stride);
        }
    }
    if (e.kind == Epilogue::LOOKUP) {
        const __m256i none = _mm256_setzero_si256(), last = _mm256_set1_epi32(to.last),
                      starts = load(e.starts + channel);
        for (; r < rows; ++r, at += stride) {
            const __m256i code = _mm256_min_epi32(_mm256_max_epi32(rescale(load(acc + r * columns)), none), last);
            put_looked_up(e, _mm256_add_epi32(code, starts), y, at);
        }
        return;
    }
    for (; r < rows; ++r, at += stride) {
        const __m256i code = rescale(load(acc + r * columns));
        if (e.kind == Epilogue::I32) {
            store(static_cast<std::int32_t*>(y) + at, code);
        } else {
            put_codes(code, to.last, e.wide, y, at);
        }
    }
}

FQVIT_INLINE __m256i residual_of(const Residual& x, std::int64_t at) {
    switch (x.type) {
        case Residual::U8: return from_u8(static_cast<const std::uint8_t*>(x.x) + at);
        case Residual::U16: return from_u16(static_cast<const std::uint16_t*>(x.x) + at);
        default:
            return _mm256_cvtepi16_epi32(
                _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const std::int16_t*>(x.x) + at)));
    }
}

// (acc + bias) mult + ((x - zero) << alpha) x_mult, rounded by a shift of at most 32: the result is the lower half of
// each sum.
FQVIT_AVX2 void finish_sum(const Epilogue& e, const Tile& tile, const std::int32_t* acc, std::int64_t channel,
                           void* y) {
    const Rescale& to = e.rescale;
    const Residual& x = e.residual;
    const __m256i bias = load(e.bias + channel), zero = load(to.zero + channel);
    const __m256i mult = load(to.mult + channel), x_mult = load(x.mult + channel);
    const __m256i x_zero = load(x.zero + channel), alpha = load(x.alpha + channel);
    const __m256i shift = from_u8(to.shift + channel), low = _mm256_set1_epi64x(0xffffffff);
    const __m256i shift_even = _mm256_and_si256(shift, low), shift_odd = _mm256_srli_epi64(shift, 32),
                  one = _mm256_set1_epi64x(1);
    const __m256i half_even = _mm256_sllv_epi64(one, _mm256_sub_epi64(shift_even, one));
    const __m256i half_odd = _mm256_sllv_epi64(one, _mm256_sub_epi64(shift_odd, one));
    const __m256i mult_odd = _mm256_srli_epi64(mult, 32), x_mult_odd = _mm256_srli_epi64(x_mult, 32);
    for (int r = 0; r < tile.rows; ++r) {
        const std::int64_t at = (tile.row + r) * tile.stride + channel;
        const __m256i a = _mm256_add_epi32(load(acc + r * tile.columns), bias);
        const __m256i v = _mm256_sllv_epi32(_mm256_sub_epi32(residual_of(x, at), x_zero), alpha);
        const __m256i even = _mm256_add_epi64(_mm256_mul_epi32(a, mult), _mm256_mul_epi32(v, x_mult));
        const __m256i odd = _mm256_add_epi64(_mm256_mul_epi32(_mm256_srli_epi64(a, 32), mult_odd),
                                             _mm256_mul_epi32(_mm256_srli_epi64(v, 32), x_mult_odd));
        const __m256i rounded = lower_halves(_mm256_srlv_epi64(_mm256_add_epi64(even, half_even), shift_even),
                                             _mm256_srlv_epi64(_mm256_add_epi64(odd, half_odd), shift_odd));
        put_codes(_mm256_add_epi32(rounded, zero), to.last, e.wide, y, at);
    }
}

FQVIT_AVX2 void finish(const Epilogue& e, const Tile& tile, void* y) {
    const bool rescaled = (e.kind == Epilogue::CODES || e.kind == Epilogue::LOOKUP || e.kind == Epilogue::I32) &&
                          e.rescale.form == Rescale::HIGH;
    const bool summed = e.kind == Epilogue::ADD && e.low;
    int c = 0;
    if (rescaled || summed) {
        for (; c + LANES <= tile.taken; c += LANES) {
            (rescaled ? finish_rescaled : finish_sum)(e, tile, tile.acc + c, tile.channel + c, y);
        }
    }
    if (c < tile.taken) {
        kernels_scalar()->finish(
            e, {tile.acc + c, tile.rows, tile.columns, tile.taken - c, tile.row, tile.channel + c, tile.stride}, y);
    }
}

// floor(sqrt(x)) for 2^60 <= x < 2^62: Newton's steps from a table, then to the exact one.
std::int64_t root_of_large(std::uint64_t x) {
    static constexpr struct Table {
        std::uint32_t start[256] = {};
        constexpr Table() {
            for (std::uint64_t i = 64; i < 256; ++i) {
                std::uint64_t root = 1u << 30;
                while (root * root < (i + 1) << 54) root += 1u << 22;  // from above, within 2^-8
                start[i] = static_cast<std::uint32_t>(root);
            }
        }
    } table;
    std::uint64_t root = table.start[x >> 54];
    root = (root + x / root) / 2;  // never below the exact root, error squared
    root = (root + x / root) / 2;
    while (root * root > x) --root;
    return static_cast<std::int64_t>(root);
}

// v = (x - zero) << alpha as i32
FQVIT_INLINE __m256i lifted(const Norm& norm, const void* x, std::int64_t at, std::int64_t c) {
    const __m256i codes = norm.wide_in ? from_u16(static_cast<const std::uint16_t*>(x) + at)
                                       : from_u8(static_cast<const std::uint8_t*>(x) + at);
    return _mm256_sllv_epi32(_mm256_sub_epi32(codes, load(norm.zero + c)), load(norm.alpha + c));
}

FQVIT_INLINE std::int64_t sum_of(__m256i v) {
    const __m128i both = _mm_add_epi64(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    return _mm_cvtsi128_si64(both) + _mm_extract_epi64(both, 1);
}

// Four channels of y before the clamp: t = round(n 2^s / d) exactly, then (t g + b) >> shift in the upper halves.
// q = round(n rho / 2^(61 - s)) with rho = floor(2^61 / d) is off by at most one (|t| < 2^30), which the remainder n
// 2^s - q d tells.
struct Divider {
    __m256i rho, bias, unbias, down, d, d_half;
    __m128i down_count, up_count;

    FQVIT_INLINE __m256i operator()(__m128i four, const std::int32_t* g_at, const std::int64_t* b_at) const {
        const __m256i n = _mm256_cvtepi32_epi64(four), b = load(b_at);
        const __m256i g = _mm256_cvtepi32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(g_at)));
        // An arithmetic shift of 64 bits: add 2^63, shift, take it away again.
        const __m256i raised = _mm256_add_epi64(_mm256_mul_epi32(n, rho), bias);
        __m256i q = _mm256_sub_epi64(_mm256_srl_epi64(raised, down_count), unbias);
        const __m256i rest =
            _mm256_add_epi64(_mm256_sub_epi64(_mm256_sll_epi64(n, up_count), _mm256_mul_epi32(q, d)), d_half);
        q = _mm256_add_epi64(q, _mm256_cmpgt_epi64(_mm256_setzero_si256(), rest));  // rest < 0: one less
        q = _mm256_sub_epi64(q, _mm256_cmpgt_epi64(rest, down));                    // rest >= d: one more
        return _mm256_add_epi64(_mm256_mul_epi32(q, g), b);
    }
};

// Sums of a row.
struct Moments {
    std::int64_t sum, squares;
};

FQVIT_INLINE Moments moments_of(const Norm& norm, const void* x, std::int64_t first) {
    __m256i m1 = _mm256_setzero_si256(), m2 = m1;
    for (std::int64_t c = 0; c < norm.channels; c += LANES) {
        const __m256i v = lifted(norm, x, first + c, c), odd = _mm256_srli_epi64(v, 32);
        m1 = _mm256_add_epi32(m1, v);  // fits: C |v| < 2^31
        m2 = _mm256_add_epi64(m2, _mm256_add_epi64(_mm256_mul_epi32(v, v), _mm256_mul_epi32(odd, odd)));
    }
    const __m256i wide = _mm256_add_epi64(_mm256_cvtepi32_epi64(_mm256_castsi256_si128(m1)),
                                          _mm256_cvtepi32_epi64(_mm256_extracti128_si256(m1, 1)));
    return {sum_of(wide), sum_of(m2)};
}

// 16 codes as int16, u16 less 2^15.
FQVIT_INLINE __m256i plain_codes(const Norm& norm, const void* x, std::int64_t at) {
    if (norm.wide_in)
        return _mm256_xor_si256(load(static_cast<const std::uint16_t*>(x) + at), _mm256_set1_epi16(-32768));
    return _mm256_cvtepu8_epi16(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const std::uint8_t*>(x) + at)));
}

FQVIT_INLINE Moments plain_moments(const Norm& norm, const void* x, std::int64_t first) {
    const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi64x(0xffffffff);
    __m256i m1 = _mm256_setzero_si256(), even = m1, odd = m1;
    for (std::int64_t c = 0; c < norm.channels; c += 2 * LANES) {
        const __m256i v = plain_codes(norm, x, first + c);
        const __m256i squares = _mm256_madd_epi16(v, v);  // two of them: 2^31 at most, read as unsigned
        m1 = _mm256_add_epi32(m1, _mm256_madd_epi16(v, ones));
        even = _mm256_add_epi64(even, _mm256_and_si256(squares, low));
        odd = _mm256_add_epi64(odd, _mm256_srli_epi64(squares, 32));
    }
    const __m256i wide = _mm256_add_epi64(_mm256_cvtepi32_epi64(_mm256_castsi256_si128(m1)),
                                          _mm256_cvtepi32_epi64(_mm256_extracti128_si256(m1, 1)));
    return {sum_of(wide), sum_of(_mm256_add_epi64(even, odd))};
}

// What a row is divided by.
struct RowScale {
    std::int64_t sum, d, rho;
    int j;
};

FQVIT_INLINE RowScale scale_of(const Norm& norm, Moments m) {
    const std::int64_t big = norm.channels * m.squares - m.sum * m.sum + norm.epsilon;
    const int j = (61 - (63 - __builtin_clzll(static_cast<std::uint64_t>(big)))) >> 1;
    const std::int64_t d = root_of_large(static_cast<std::uint64_t>(big) << 2 * j), exact = (std::int64_t{1} << 61) / d;
    return {m.sum, d, exact < 0x7fffffff ? exact : 0x7fffffff, j};
}

FQVIT_INLINE Divider divider_of(const RowScale& row) {
    const int s = 24 + row.j, k = 61 - s;
    const std::int64_t top = std::int64_t{1} << 62;  // |n rho| < 2^62: raising by 2^62 is enough and does not wrap
    Divider divide;
    divide.rho = _mm256_set1_epi64x(row.rho);
    divide.bias = _mm256_set1_epi64x(top + (std::int64_t{1} << (k - 1)));
    divide.unbias = _mm256_set1_epi64x(top >> k);
    divide.down = _mm256_set1_epi64x(row.d - 1);
    divide.d = _mm256_set1_epi64x(row.d);
    divide.d_half = _mm256_set1_epi64x(row.d / 2);
    divide.down_count = _mm_cvtsi32_si128(k), divide.up_count = _mm_cvtsi32_si128(s);
    return divide;
}

FQVIT_INLINE void put_normalized(const Norm& norm, const Divider& divide, __m256i n, std::int64_t c, void* y,
                                 std::int64_t at) {
    const __m256i low = divide(_mm256_castsi256_si128(n), norm.g + c, norm.b + c);
    const __m256i high = divide(_mm256_extracti128_si256(n, 1), norm.g + c + 4, norm.b + c + 4);
    // Upper halves of 0..3 and 4..7 in order: interleaved by the blend, then put right.
    const __m256i ordered =
        _mm256_permutevar8x32_epi32(upper_halves(low, high), _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
    put_codes(_mm256_sra_epi32(ordered, _mm_cvtsi32_si128(norm.shift - 32)), static_cast<std::int32_t>(norm.last),
              norm.wide_out, y, at);
}

FQVIT_AVX2 void normalize_row(const Norm& norm, const RowScale& row, const void* x, void* y, std::int64_t first) {
    const Divider divide = divider_of(row);
    const __m256i count = _mm256_set1_epi32(static_cast<int>(norm.channels)),
                  sum = _mm256_set1_epi32(static_cast<int>(row.sum));
    for (std::int64_t c = 0; c < norm.channels; c += LANES) {
        const __m256i n = _mm256_sub_epi32(_mm256_mullo_epi32(lifted(norm, x, first + c, c), count), sum);
        put_normalized(norm, divide, n, c, y, first + c);
    }
}

FQVIT_AVX2 void normalize_plain_row(const Norm& norm, const RowScale& row, const void* x, void* y, std::int64_t first) {
    const Divider divide = divider_of(row);
    const __m256i count = _mm256_set1_epi32(static_cast<int>(norm.channels)),
                  sum = _mm256_set1_epi32(static_cast<int>(row.sum));
    for (std::int64_t c = 0; c < norm.channels; c += 2 * LANES) {
        const __m256i v = plain_codes(norm, x, first + c);
        // C fits 15 bits, so that a product with it is one vpmaddwd on the codes' low halves.
        const __m256i left = _mm256_madd_epi16(_mm256_cvtepi16_epi32(_mm256_castsi256_si128(v)), count);
        const __m256i right = _mm256_madd_epi16(_mm256_cvtepi16_epi32(_mm256_extracti128_si256(v, 1)), count);
        put_normalized(norm, divide, _mm256_sub_epi32(left, sum), c, y, first + c);
        put_normalized(norm, divide, _mm256_sub_epi32(right, sum), c + LANES, y, first + c + LANES);
    }
}

FQVIT_AVX2 void normalize(const Norm& norm, const void* x, void* y, std::int64_t rows) {
    if (!norm.narrow || norm.channels % LANES != 0) {
        kernels_scalar()->normalize(norm, x, y, rows);
        return;
    }
    // Roots and divisions of several rows at a time, so that one does not wait for the other.
    constexpr std::int64_t GROUP = 8;
    for (std::int64_t r = 0; r < rows; r += GROUP) {
        RowScale scales[GROUP];
        const std::int64_t count = rows - r < GROUP ? rows - r : GROUP;
        for (std::int64_t i = 0; i < count; ++i) {
            const std::int64_t first = (r + i) * norm.channels;
            scales[i] = scale_of(norm, norm.plain ? plain_moments(norm, x, first) : moments_of(norm, x, first));
        }
        for (std::int64_t i = 0; i < count; ++i) {
            (norm.plain ? normalize_plain_row : normalize_row)(norm, scales[i], x, y, (r + i) * norm.channels);
        }
    }
}

}  // namespace

const Kernels* kernels_avx2() {
    static constexpr Kernels table = {"avx2", finish, normalize, attend_avx2, attend_scratch_avx2};
    return &table;
}

}  // namespace fqvit

#else

namespace fqvit {
const Kernels* kernels_avx2() { return nullptr; }
}  // namespace fqvit

#endif
