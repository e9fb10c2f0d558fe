// Epilogue and LayerNorm with AVX2, 8 channels x i32 per vector. kernels.h has the formulas.
//
// Exact because vpmuldq multiplies i32 to full 64-bit products and the ops prove that every sum fits in 63 bits. The
// scalar kernels handle parameters that the vector code does not support, and channels past the last multiple of 8.
#include "kernels/kernels.h"
#include "kernels/scalar/row_product_scalar.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include "core/fixed.h"
#include "kernels/avx2/attention_avx2.h"
#include "kernels/avx2/avx2.h"
#include "kernels/norm_row.h"

namespace fqvit {
namespace {

using namespace avx2;

constexpr int LANES = 8;
constexpr int MAX_ROWS = 16;  // rows whose indices are looked up together

// Stores tables[entry] of 8 channels per row. Scalar loads are faster than a gather here, and one store of 8 bytes is
// faster than 8 stores.
FQVIT_INLINE void store_looked_up(const std::uint8_t* tables, const std::uint32_t* entry, int rows, std::uint8_t* y,
                                  std::int64_t stride) {
    for (int r = 0; r < rows; ++r, entry += LANES, y += stride) {
        __m128i v = _mm_cvtsi32_si128(tables[entry[0]]);
        v = _mm_insert_epi8(v, tables[entry[1]], 1), v = _mm_insert_epi8(v, tables[entry[2]], 2);
        v = _mm_insert_epi8(v, tables[entry[3]], 3), v = _mm_insert_epi8(v, tables[entry[4]], 4);
        v = _mm_insert_epi8(v, tables[entry[5]], 5), v = _mm_insert_epi8(v, tables[entry[6]], 6);
        _mm_storel_epi64(reinterpret_cast<__m128i*>(y), _mm_insert_epi8(v, tables[entry[7]], 7));
    }
}
FQVIT_INLINE void store_looked_up(const std::uint16_t* tables, const std::uint32_t* entry, int rows, std::uint16_t* y,
                                  std::int64_t stride) {
    for (int r = 0; r < rows; ++r, entry += LANES, y += stride) {
        for (int i = 0; i < LANES; ++i) y[i] = tables[entry[i]];
    }
}

// Saturates four rows of 8 codes to 0..last <= 255 and stores them.
FQVIT_INLINE void store_four_rows(const __m256i (&code)[4], std::int32_t last, std::uint8_t* y, std::int64_t stride) {
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

// CODES, LOOKUP and I32 on 8 valid columns. vector_half includes bias and zero point.
FQVIT_AVX2 void epilogue_requantize(const Epilogue& e, const Tile& tile, const std::int32_t* acc, std::int64_t channel,
                                    void* y) {
    const Requantization& q = e.requantization;
    const __m256i mult = load(q.vector_mult + channel);
    const RequantizeHigh requantize_high = {mult, _mm256_srli_epi64(mult, 32), load(q.vector_half + channel),
                                            load(q.vector_half + channel + 4), load(q.vector_shift + channel)};
    const __m128i lift = _mm_cvtsi32_si128(q.lift);
    const auto lifted = [&](int row) FQVIT_AVX2 { return _mm256_sll_epi32(load(acc + row * tile.columns), lift); };
    const int rows = tile.rows;
    const std::int64_t stride = tile.stride;
    std::int64_t at = tile.row * stride + channel;
    int r = 0;
    if (e.kind == Epilogue::CODES && !e.wide) {
        for (; r + 4 <= rows; r += 4, at += 4 * stride) {
            __m256i code[4];
            for (int i = 0; i < 4; ++i) code[i] = requantize_high(lifted(r + i));
            store_four_rows(code, q.last, static_cast<std::uint8_t*>(y) + at, stride);
        }
    }
    if (e.kind == Epilogue::LOOKUP) {
        const __m256i zero = _mm256_setzero_si256(), last = _mm256_set1_epi32(q.last);
        const __m256i starts = load(e.starts + channel);
        // Compute the indices of all rows first, so that no load waits for the store of its index.
        alignas(32) std::uint32_t entry[MAX_ROWS * LANES];
        for (; r < rows; r += MAX_ROWS, at += MAX_ROWS * stride) {
            const int count = rows - r < MAX_ROWS ? rows - r : MAX_ROWS;
            for (int i = 0; i < count; ++i) {
                const __m256i code = _mm256_min_epi32(_mm256_max_epi32(requantize_high(lifted(r + i)), zero), last);
                store(entry + i * LANES, _mm256_add_epi32(code, starts));
            }
            if (e.wide) {
                store_looked_up(static_cast<const std::uint16_t*>(e.tables), entry, count,
                                static_cast<std::uint16_t*>(y) + at, stride);
            } else {
                store_looked_up(static_cast<const std::uint8_t*>(e.tables), entry, count,
                                static_cast<std::uint8_t*>(y) + at, stride);
            }
        }
        return;
    }
    for (; r < rows; ++r, at += stride) {
        const __m256i code = requantize_high(lifted(r));
        if (e.kind == Epilogue::I32) {
            store(static_cast<std::int32_t*>(y) + at, code);
        } else {
            store_codes(code, q.last, e.wide, y, at);
        }
    }
}

FQVIT_INLINE __m256i load_residual(const Residual& x, std::int64_t at) {
    switch (x.type) {
        case Residual::U8: return from_u8(static_cast<const std::uint8_t*>(x.x) + at);
        case Residual::U16: return from_u16(static_cast<const std::uint16_t*>(x.x) + at);
        default:
            return _mm256_cvtepi16_epi32(
                _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const std::int16_t*>(x.x) + at)));
    }
}

// ADD on 8 valid columns: round_shift((acc + bias) * mult + (x - x_zero) * 2^alpha * x_mult, shift). For shifts of at
// most 32, the shifted sum fits in i32 (Epilogue::low_half), so a logical shift is enough. Otherwise, the high half is
// shifted.
FQVIT_AVX2 void epilogue_add(const Epilogue& e, const Tile& tile, const std::int32_t* acc, std::int64_t channel,
                             void* y) {
    const Requantization& q = e.requantization;
    const Residual& x = e.residual;
    const __m256i bias = load(e.bias + channel), zero = load(q.zero + channel);
    const __m256i mult = load(q.mult + channel), x_mult = load(x.mult + channel);
    const __m256i x_zero = load(x.zero + channel), alpha = load(x.alpha + channel);
    const __m256i shift = from_u8(q.shift + channel), low = _mm256_set1_epi64x(0xffffffff);
    const __m256i shift_even = _mm256_and_si256(shift, low), shift_odd = _mm256_srli_epi64(shift, 32);
    const __m256i one = _mm256_set1_epi64x(1);
    const __m256i half_even = _mm256_sllv_epi64(one, _mm256_sub_epi64(shift_even, one));
    const __m256i half_odd = _mm256_sllv_epi64(one, _mm256_sub_epi64(shift_odd, one));
    const __m256i mult_odd = _mm256_srli_epi64(mult, 32), x_mult_odd = _mm256_srli_epi64(x_mult, 32);
    for (int r = 0; r < tile.rows; ++r) {
        const std::int64_t at = (tile.row + r) * tile.stride + channel;
        const __m256i a = _mm256_add_epi32(load(acc + r * tile.columns), bias);
        const __m256i v = _mm256_sllv_epi32(_mm256_sub_epi32(load_residual(x, at), x_zero), alpha);
        const __m256i even = _mm256_add_epi64(_mm256_mul_epi32(a, mult), _mm256_mul_epi32(v, x_mult));
        const __m256i odd = _mm256_add_epi64(_mm256_mul_epi32(_mm256_srli_epi64(a, 32), mult_odd),
                                             _mm256_mul_epi32(_mm256_srli_epi64(v, 32), x_mult_odd));
        const __m256i sum_even = _mm256_add_epi64(even, half_even), sum_odd = _mm256_add_epi64(odd, half_odd);
        const __m256i rounded =
            e.low_half
                ? low_halves(_mm256_srlv_epi64(sum_even, shift_even), _mm256_srlv_epi64(sum_odd, shift_odd))
                : _mm256_srav_epi32(high_halves(sum_even, sum_odd), _mm256_sub_epi32(shift, _mm256_set1_epi32(32)));
        store_codes(_mm256_add_epi32(rounded, zero), q.last, e.wide, y, at);
    }
}

FQVIT_AVX2 void epilogue(const Epilogue& e, const Tile& tile, void* y) {
    const bool requantizes = (e.kind == Epilogue::CODES || e.kind == Epilogue::LOOKUP || e.kind == Epilogue::I32) &&
                             e.requantization.form != Requantization::ANY;
    const bool adds = e.kind == Epilogue::ADD && (e.low_half || e.high_half);
    int c = 0;
    if (requantizes || adds) {
        for (; c + LANES <= tile.valid_columns; c += LANES) {
            (requantizes ? epilogue_requantize : epilogue_add)(e, tile, tile.acc + c, tile.channel + c, y);
        }
    }
    if (c < tile.valid_columns) {
        Tile rest = tile;
        rest.acc += c, rest.channel += c, rest.valid_columns -= c;
        kernels_scalar()->epilogue(e, rest, y);
    }
}

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

    FQVIT_INLINE void operator()(__m256i n, std::int64_t c, void* y, std::int64_t at) {
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
        store_codes(code, static_cast<std::int32_t>(norm.last), norm.wide_out, y, at);
    }
};

// Calls store with n = C * v - M1 of 8 channels at a time.
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
        store(_mm256_sub_epi32(left, sum), c, y, first + c);
        store(_mm256_sub_epi32(right, sum), c + LANES, y, first + c + LANES);
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

FQVIT_AVX2 void layernorm(const Norm& norm, const void* x, void* y, std::int64_t rows) {
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

FQVIT_AVX2 void multiply_row(const RowProduct& product, std::int32_t* acc) { scalar::multiply_row(product, acc); }

}  // namespace

const Kernels* kernels_avx2() {
    static constexpr Kernels table = {"avx2",       epilogue,         layernorm, attention_avx2, attention_scratch_avx2,
                                      multiply_row, &elementwise_avx2};
    return &table;
}

}  // namespace fqvit

#else

namespace fqvit {
const Kernels* kernels_avx2() { return nullptr; }
}  // namespace fqvit

#endif
