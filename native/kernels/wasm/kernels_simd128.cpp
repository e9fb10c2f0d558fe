// Epilogues with SIMD128, 8 channels at a time, and the table of SIMD128 kernels. kernels.h has the formulas.
//
// Exact because products have 64 bits and the ops prove that every sum fits in 63 bits. SIMD128 has no shift by a
// different count per lane, so lanes are multiplied by different powers of two and then shifted by the same count. The
// scalar kernels handle parameters that do not fit, and channels past the last multiple of 8.
#include "kernels/kernels.h"

#if defined(__wasm_simd128__)

#include <algorithm>

#include "kernels/scalar/row_product_scalar.h"
#include "kernels/wasm/kernels_simd128.h"
#include "kernels/wasm/simd128.h"

namespace fqvit {
namespace {

using namespace simd128;

constexpr int LANES = 8;
constexpr int MAX_ROWS = 32;  // rows that one pass of look_up() handles

// The codes of 8 channels, for Requantization::HIGH_HALF. With h the high half of the 64-bit sum, the code is
// clamp(h >> s, 0, last) = min(max(h, 0), 2^s * (last + 1) - 1) * 2^(UNIFORM - s) >> UNIFORM.
template <int UNIFORM>
struct Codes {
    v128_t mult[2], half[4], limit[2], power[2];

    // Returns whether every shift is small enough for 32 bits.
    bool set(const Epilogue& e, std::int64_t channel) {
        const Requantization& q = e.requantization;
        alignas(16) std::int32_t limits[LANES], powers[LANES];
        for (int i = 0; i < LANES; ++i) {
            const std::int32_t shift = q.vector_shift[channel + i];
            if (shift > (UNIFORM == 16 ? 15 : UNIFORM)) return false;
            limits[i] = static_cast<std::int32_t>(((q.last + std::int64_t{1}) << shift) - 1);
            powers[i] = 1 << (UNIFORM - shift);
        }
        for (int i = 0; i < 2; ++i) {
            mult[i] = wasm_v128_load(q.vector_mult + channel + 4 * i);
            limit[i] = wasm_v128_load(limits + 4 * i), power[i] = wasm_v128_load(powers + 4 * i);
            // Channels are stored in the order 0 2 4 6 1 3 5 7.
            const v128_t even = wasm_v128_load(q.vector_half + channel + 2 * i);
            const v128_t odd = wasm_v128_load(q.vector_half + channel + 4 + 2 * i);
            half[2 * i] = wasm_i64x2_shuffle(even, odd, 0, 2), half[2 * i + 1] = wasm_i64x2_shuffle(even, odd, 1, 3);
        }
        return true;
    }

    FQVIT_SIMD_INLINE v128_t four(const std::int32_t* acc, int i) const {
        const v128_t a = wasm_v128_load(acc + 4 * i);
        const v128_t h = high_halves(add_low(half[2 * i], a, mult[i]), add_high(half[2 * i + 1], a, mult[i]));
        const v128_t clamped = wasm_i32x4_min(wasm_i32x4_max(h, wasm_i32x4_const_splat(0)), limit[i]);
        return wasm_u32x4_shr(wasm_i32x4_mul(clamped, power[i]), UNIFORM);
    }
    FQVIT_SIMD_INLINE v128_t operator()(const std::int32_t* acc) const {
        return wasm_u16x8_narrow_i32x4(four(acc, 0), four(acc, 1));
    }
};

using Columns = bool (*)(const Epilogue&, const Tile&, const std::int32_t* acc, std::int64_t channel, void* y);

// CODES on 8 channels. Like the functions below, returns false and writes nothing if the parameters do not fit.
template <bool wide>
bool store_requantized(const Epilogue& e, const Tile& tile, const std::int32_t* acc, std::int64_t channel, void* y) {
    Codes<wide ? 16 : 22> codes;
    if (!codes.set(e, channel)) return false;
    const std::int64_t columns = tile.columns, stride = tile.stride;
    auto* to = static_cast<std::uint8_t*>(y) + (tile.row * stride + channel) * (wide ? 2 : 1);
    for (int r = tile.rows; r > 0; --r, acc += columns, to += stride * (wide ? 2 : 1)) {
        const v128_t words = codes(acc);
        if constexpr (wide) {
            wasm_v128_store(to, words);
        } else {
            wasm_v128_store64_lane(to, wasm_u8x16_narrow_i16x8(words, words), 0);
        }
    }
    return true;
}

// LOOKUP on 8 channels: computes the codes of several rows, then looks them up with scalar loads from the tables.
template <int UNIFORM, class Entry>
bool look_up(const Epilogue& e, const Tile& tile, const std::int32_t* acc, std::int64_t channel, void* y) {
    Codes<UNIFORM> codes;
    if (!codes.set(e, channel)) return false;
    const Entry* table[LANES];
    for (int i = 0; i < LANES; ++i) table[i] = static_cast<const Entry*>(e.tables) + e.starts[channel + i];
    auto* to = static_cast<Entry*>(y) + tile.row * tile.stride + channel;
    for (int first = 0; first < tile.rows; first += MAX_ROWS) {
        const int rows = std::min(MAX_ROWS, tile.rows - first);
        alignas(16) std::uint16_t found[MAX_ROWS * LANES];
        for (int r = 0; r < rows; ++r, acc += tile.columns) wasm_v128_store(found + r * LANES, codes(acc));
        for (int r = 0; r < rows; ++r, to += tile.stride) {
            const std::uint16_t* code = found + r * LANES;
            const Entry entry[LANES] = {table[0][code[0]], table[1][code[1]], table[2][code[2]], table[3][code[3]],
                                        table[4][code[4]], table[5][code[5]], table[6][code[6]], table[7][code[7]]};
            std::memcpy(to, entry, sizeof entry);
        }
    }
    return true;
}

template <Residual::Type type>
FQVIT_SIMD_INLINE void load_residual(const void* x, std::int64_t at, v128_t (&to)[2]) {
    if constexpr (type == Residual::I16) {
        const v128_t words = wasm_v128_load(static_cast<const std::int16_t*>(x) + at);
        to[0] = wasm_i32x4_extend_low_i16x8(words), to[1] = wasm_i32x4_extend_high_i16x8(words);
    } else {
        const v128_t words = load_codes(x, type == Residual::U16, at);
        to[0] = wasm_u32x4_extend_low_u16x8(words), to[1] = wasm_u32x4_extend_high_u16x8(words);
    }
}

// ADD on 8 channels if Epilogue::low_half: the sum, rounded and shifted by at most 32, fits in i32. Both terms are
// multiplied by 2^lift with lift = 32 - shift, so that the result is the high half of
//     (acc + bias) * (mult * 2^lift) + ((x - x_zero) * 2^(alpha + lift)) * x_mult + 2^31.
template <Residual::Type type, bool wide>
bool add_residual(const Epilogue& e, const Tile& tile, const std::int32_t* acc, std::int64_t channel, void* y) {
    const Requantization& q = e.requantization;
    const Residual& x = e.residual;
    constexpr int CODE_BITS = type == Residual::U8 ? 8 : 16;
    alignas(16) std::int32_t lifted[LANES], powers[LANES];
    for (int i = 0; i < LANES; ++i) {
        const int lift = 32 - q.shift[channel + i];
        const std::uint64_t mult = std::uint64_t{q.mult[channel + i]} << lift;
        if (mult >> 31 != 0 || x.alpha[channel + i] + lift + CODE_BITS > 30) return false;
        lifted[i] = static_cast<std::int32_t>(mult), powers[i] = 1 << (x.alpha[channel + i] + lift);
    }
    v128_t bias[2], zero[2], mult[2], x_zero[2], power[2], x_mult[2];
    for (int i = 0; i < 2; ++i) {
        const std::int64_t c = channel + 4 * i;
        bias[i] = wasm_v128_load(e.bias + c), zero[i] = wasm_v128_load(q.zero + c);
        mult[i] = wasm_v128_load(lifted + 4 * i), power[i] = wasm_v128_load(powers + 4 * i);
        x_zero[i] = wasm_v128_load(x.zero + c), x_mult[i] = wasm_v128_load(x.mult + c);
    }
    const v128_t half = wasm_i64x2_const_splat(std::int64_t{1} << 31);
    const void* from = x.x;
    const std::int64_t columns = tile.columns, stride = tile.stride;
    const std::int32_t last = q.last;
    std::int64_t at = tile.row * stride + channel;
    for (int r = tile.rows; r > 0; --r, acc += columns, at += stride) {
        v128_t codes[2], sum[2];
        load_residual<type>(from, at, codes);
        for (int i = 0; i < 2; ++i) {
            const v128_t a = wasm_i32x4_add(wasm_v128_load(acc + 4 * i), bias[i]);
            const v128_t v = wasm_i32x4_mul(wasm_i32x4_sub(codes[i], x_zero[i]), power[i]);
            const v128_t low = add_low(add_low(half, a, mult[i]), v, x_mult[i]);
            const v128_t high = add_high(add_high(half, a, mult[i]), v, x_mult[i]);
            sum[i] = wasm_i32x4_add(high_halves(low, high), zero[i]);
        }
        store_codes(sum[0], sum[1], last, wide, y, at);
    }
    return true;
}

bool add_bias(const Epilogue& e, const Tile& tile, const std::int32_t* acc, std::int64_t channel, void* y) {
    const v128_t low = wasm_v128_load(e.bias + channel), high = wasm_v128_load(e.bias + channel + 4);
    auto* to = static_cast<std::int32_t*>(y) + tile.row * tile.stride + channel;
    for (int r = 0; r < tile.rows; ++r, acc += tile.columns, to += tile.stride) {
        wasm_v128_store(to, wasm_i32x4_add(wasm_v128_load(acc), low));
        wasm_v128_store(to + 4, wasm_i32x4_add(wasm_v128_load(acc + 4), high));
    }
    return true;
}

Columns choose_add(const Epilogue& e) {
    switch (e.residual.type) {
        case Residual::U8: return e.wide ? add_residual<Residual::U8, true> : add_residual<Residual::U8, false>;
        case Residual::U16: return e.wide ? add_residual<Residual::U16, true> : add_residual<Residual::U16, false>;
        default: return e.wide ? add_residual<Residual::I16, true> : add_residual<Residual::I16, false>;
    }
}

// Null if only the scalar kernel supports the epilogue.
Columns choose_columns(const Epilogue& e) {
    if (e.kind == Epilogue::ACC) return add_bias;
    if (e.kind == Epilogue::ADD) return e.low_half ? choose_add(e) : nullptr;
    if (e.requantization.form != Requantization::HIGH_HALF || e.kind == Epilogue::I32) return nullptr;
    const bool wide_code = e.requantization.last > 255;
    if (e.kind == Epilogue::CODES) return e.wide ? store_requantized<true> : store_requantized<false>;
    if (e.wide) return wide_code ? look_up<16, std::uint16_t> : look_up<22, std::uint16_t>;
    return wide_code ? look_up<16, std::uint8_t> : look_up<22, std::uint8_t>;
}

void epilogue(const Epilogue& e, const Tile& tile, void* y) {
    const Columns eight = choose_columns(e);
    for (int c = 0; c < tile.valid_columns; c += LANES) {
        Tile part = tile;
        part.acc += c, part.channel += c, part.valid_columns = std::min(LANES, tile.valid_columns - c);
        if (eight == nullptr || part.valid_columns < LANES || !eight(e, tile, part.acc, part.channel, y)) {
            kernels_scalar()->epilogue(e, part, y);
        }
    }
}

// The compiler vectorizes these loops.
void multiply_row(const RowProduct& product, std::int32_t* acc) { scalar::multiply_row(product, acc); }

}  // namespace

const Kernels* kernels_simd128() {
    static constexpr Kernels table = {
        "simd128",    epilogue,           layernorm_simd128, attention_simd128, attention_scratch_simd128,
        multiply_row, &elementwise_scalar};
    return &table;
}

}  // namespace fqvit

#else

namespace fqvit {
const Kernels* kernels_simd128() { return nullptr; }
}  // namespace fqvit

#endif
