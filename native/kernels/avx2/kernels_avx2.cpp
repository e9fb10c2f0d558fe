// The table of AVX2 kernels, and the epilogue, 8 channels x i32 per vector. kernels.h has the formulas.
//
// Exact because vpmuldq multiplies i32 to full 64-bit products and the ops prove that every sum fits in 63 bits. The
// scalar kernels handle parameters that the vector code does not support, and channels past the last multiple of 8.
#include "kernels/kernels.h"
#include "kernels/scalar/row_product_scalar.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include "core/fixed.h"
#include "kernels/avx2/attention_avx2.h"
#include "kernels/avx2/avx2.h"
#include "kernels/avx2/layernorm_avx2.h"

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

// CODES, LOOKUP and I32 on 8 valid columns. vector_half includes bias and zero point. lifts: the form is LIFTED; a
// shift by a variable is two instructions on some CPUs.
template <bool lifts>
FQVIT_AVX2 void epilogue_requantize(const Epilogue& e, const Tile& tile, const std::int32_t* acc, std::int64_t channel,
                                    void* y) {
    const Requantization& q = e.requantization;
    const __m256i mult = load(q.vector_mult + channel);
    const RequantizeHigh requantize_high = {mult, _mm256_srli_epi64(mult, 32), load(q.vector_half + channel),
                                            load(q.vector_half + channel + 4), load(q.vector_shift + channel)};
    const __m128i lift = _mm_cvtsi32_si128(q.lift);
    const std::int64_t columns = tile.columns, stride = tile.stride;
    const auto requantized = [&](int row) FQVIT_AVX2 {
        const __m256i v = load(acc + row * columns);
        return requantize_high(lifts ? _mm256_sll_epi32(v, lift) : v);
    };
    const int rows = tile.rows;
    std::int64_t at = tile.row * stride + channel;
    if (e.kind == Epilogue::CODES && !e.wide && rows >= 4) {
        // The last four rows may overlap those before them.
        for (int r = 0;; r = r + 4 > rows - 4 ? rows - 4 : r + 4) {
            const __m256i code[] = {requantized(r), requantized(r + 1), requantized(r + 2), requantized(r + 3)};
            store_four_rows(code, q.last, static_cast<std::uint8_t*>(y) + at + r * stride, stride);
            if (r + 4 == rows) return;
        }
    }
    if (e.kind == Epilogue::LOOKUP) {
        const __m256i zero = _mm256_setzero_si256(), last = _mm256_set1_epi32(q.last);
        const __m256i starts = load(e.starts + channel);
        // Compute the indices of all rows first, so that no load waits for the store of its index.
        alignas(32) std::uint32_t entry[MAX_ROWS * LANES];
        for (int r = 0; r < rows; r += MAX_ROWS, at += MAX_ROWS * stride) {
            const int count = rows - r < MAX_ROWS ? rows - r : MAX_ROWS;
            for (int i = 0; i < count; ++i) {
                const __m256i code = _mm256_min_epi32(_mm256_max_epi32(requantized(r + i), zero), last);
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
    for (int r = 0; r < rows; ++r, at += stride) {
        const __m256i code = requantized(r);
        if (e.kind == Epilogue::I32) {
            store(static_cast<std::int32_t*>(y) + at, code);
        } else {
            store_codes(code, q.last, e.wide, y, at);
        }
    }
}

template <Residual::Type type>
FQVIT_INLINE __m256i load_residual(const void* x, std::int64_t at) {
    if constexpr (type == Residual::U8) {
        return from_u8(static_cast<const std::uint8_t*>(x) + at);
    } else if constexpr (type == Residual::U16) {
        return from_u16(static_cast<const std::uint16_t*>(x) + at);
    } else {
        const auto* codes = static_cast<const std::int16_t*>(x) + at;
        return _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    }
}

// The constants of ADD for 8 channels. As 64-bit sums may wrap around on the way, the terms of the bias and of x_zero
// are combined with the rounding term.
struct AddConstants {
    __m256i mult, mult_odd, x_mult, x_mult_odd, alpha, shift_even, shift_odd, term_even, term_odd;

    FQVIT_AVX2 AddConstants(const Epilogue& e, std::int64_t channel)
        : mult(load(e.requantization.mult + channel)),
          mult_odd(_mm256_srli_epi64(mult, 32)),
          x_mult(load(e.residual.mult + channel)),
          x_mult_odd(_mm256_srli_epi64(x_mult, 32)),
          alpha(load(e.residual.alpha + channel)) {
        const __m256i shift = from_u8(e.requantization.shift + channel), one = _mm256_set1_epi64x(1);
        shift_even = _mm256_and_si256(shift, _mm256_set1_epi64x(0xffffffff)), shift_odd = _mm256_srli_epi64(shift, 32);
        const __m256i bias = load(e.bias + channel);
        const __m256i x_zero = _mm256_sllv_epi32(load(e.residual.zero + channel), alpha);
        const auto term = [&](__m256i b, __m256i m, __m256i x, __m256i x_m, __m256i s) FQVIT_AVX2 {
            const __m256i half = _mm256_sllv_epi64(one, _mm256_sub_epi64(s, one));
            return _mm256_add_epi64(half, _mm256_sub_epi64(_mm256_mul_epi32(b, m), _mm256_mul_epi32(x, x_m)));
        };
        term_even = term(bias, mult, x_zero, x_mult, shift_even);
        term_odd = term(_mm256_srli_epi64(bias, 32), mult_odd, _mm256_srli_epi64(x_zero, 32), x_mult_odd, shift_odd);
    }
};

// ADD on 8 valid columns: round_shift((acc + bias) * mult + (x - x_zero) * 2^alpha * x_mult, shift). For shifts of at
// most 32, the shifted sum fits in i32 (Epilogue::low_half), so a logical shift is enough. Otherwise, the high half is
// shifted.
template <Residual::Type type, bool low_half>
FQVIT_AVX2 void epilogue_add(const Epilogue& e, const Tile& tile, const std::int32_t* acc, std::int64_t channel,
                             void* y) {
    const Requantization& q = e.requantization;
    const AddConstants constants(e, channel);
    const __m256i zero = load(q.zero + channel);
    const __m256i high_shift = _mm256_sub_epi32(from_u8(q.shift + channel), _mm256_set1_epi32(32));
    std::int64_t at = tile.row * tile.stride + channel;
    for (int r = 0; r < tile.rows; ++r, at += tile.stride, acc += tile.columns) {
        const AddConstants& k = constants;
        const __m256i a = load(acc), v = _mm256_sllv_epi32(load_residual<type>(e.residual.x, at), k.alpha);
        const __m256i even = _mm256_add_epi64(_mm256_mul_epi32(a, k.mult), _mm256_mul_epi32(v, k.x_mult));
        const __m256i odd = _mm256_add_epi64(_mm256_mul_epi32(_mm256_srli_epi64(a, 32), k.mult_odd),
                                             _mm256_mul_epi32(_mm256_srli_epi64(v, 32), k.x_mult_odd));
        const __m256i sum_even = _mm256_add_epi64(even, k.term_even), sum_odd = _mm256_add_epi64(odd, k.term_odd);
        const __m256i rounded =
            low_half ? low_halves(_mm256_srlv_epi64(sum_even, k.shift_even), _mm256_srlv_epi64(sum_odd, k.shift_odd))
                     : _mm256_srav_epi32(high_halves(sum_even, sum_odd), high_shift);
        store_codes(_mm256_add_epi32(rounded, zero), q.last, e.wide, y, at);
    }
}

using EpilogueKernel = void (*)(const Epilogue&, const Tile&, const std::int32_t*, std::int64_t, void*);

// Returns null if only the scalar kernel supports the parameters.
EpilogueKernel epilogue_kernel(const Epilogue& e) {
    if (e.kind == Epilogue::ADD) {
        static constexpr EpilogueKernel KERNELS[3][2] = {
            {epilogue_add<Residual::U8, false>, epilogue_add<Residual::U8, true>},
            {epilogue_add<Residual::U16, false>, epilogue_add<Residual::U16, true>},
            {epilogue_add<Residual::I16, false>, epilogue_add<Residual::I16, true>}};
        return e.low_half || e.high_half ? KERNELS[e.residual.type][e.low_half ? 1 : 0] : nullptr;
    }
    if (e.kind == Epilogue::ACC || e.requantization.form == Requantization::ANY) return nullptr;
    return e.requantization.lift > 0 ? epilogue_requantize<true> : epilogue_requantize<false>;
}

FQVIT_AVX2 void epilogue(const Epilogue& e, const Tile& tile, void* y) {
    const EpilogueKernel kernel = epilogue_kernel(e);
    int c = 0;
    if (kernel != nullptr) {
        for (; c + LANES <= tile.valid_columns; c += LANES) kernel(e, tile, tile.acc + c, tile.channel + c, y);
    }
    if (c < tile.valid_columns) {
        Tile rest = tile;
        rest.acc += c, rest.channel += c, rest.valid_columns -= c;
        kernels_scalar()->epilogue(e, rest, y);
    }
}

FQVIT_AVX2 void multiply_row(const RowProduct& product, std::int32_t* acc) { scalar::multiply_row(product, acc); }

}  // namespace

const Kernels* kernels_avx2() {
    static constexpr Kernels table = {
        "avx2", epilogue, layernorm_avx2, attention_avx2, attention_scratch_avx2, multiply_row, &elementwise_avx2};
    return &table;
}

}  // namespace fqvit

#else

namespace fqvit {
const Kernels* kernels_avx2() { return nullptr; }
}  // namespace fqvit

#endif
