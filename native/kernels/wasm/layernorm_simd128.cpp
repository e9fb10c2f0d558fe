// LayerNorm with SIMD128, 8 channels at a time. kernels.h has the formula.
//
// Exact because sums of squares and products with g have 64 bits, and because divisions are corrected by their
// remainder (Divider). The scalar kernel handles parameters that the vector code does not support.
#if defined(__wasm_simd128__)

#include "kernels/isqrt.h"
#include "kernels/wasm/kernels_simd128.h"
#include "kernels/wasm/simd128.h"

namespace fqvit {
namespace {

using namespace simd128;

constexpr std::int64_t LANES = 8, MAX_CHANNELS = 4096;

// The codes of one row, with functions that convert them to the integers v of kernels.h.
struct Row {
    const void* x;
    const std::int32_t *zero, *power;  // power: 2^alpha of each channel
    std::int64_t channels;
    std::int16_t offset;

    // (x - zero) * 2^alpha of 8 channels, as i32
    template <bool wide>
    FQVIT_SIMD_INLINE void shifted(std::int64_t c, v128_t (&v)[2]) const {
        const v128_t codes = load_codes(x, wide, c);
        v[0] = wasm_u32x4_extend_low_u16x8(codes), v[1] = wasm_u32x4_extend_high_u16x8(codes);
        for (int i = 0; i < 2; ++i) {
            v[i] = wasm_i32x4_mul(wasm_i32x4_sub(v[i], wasm_v128_load(zero + c + 4 * i)),
                                  wasm_v128_load(power + c + 4 * i));
        }
    }
    // 8 codes minus the offset, as i16.
    template <bool wide>
    FQVIT_SIMD_INLINE v128_t centered(std::int64_t c) const {
        return wasm_i16x8_sub(load_codes(x, wide, c), wasm_i16x8_splat(offset));
    }
};

// M1 = sum v and M2 = sum v^2 of a row.
struct Moments {
    std::int64_t sum, squares;
};

FQVIT_SIMD_INLINE std::int64_t sum_of_i64(v128_t v) {
    return wasm_i64x2_extract_lane(v, 0) + wasm_i64x2_extract_lane(v, 1);
}
FQVIT_SIMD_INLINE std::int64_t sum_of_i32(v128_t v) {
    return sum_of_i64(wasm_i64x2_add(wasm_i64x2_extend_low_i32x4(v), wasm_i64x2_extend_high_i32x4(v)));
}

template <bool wide>
FQVIT_SIMD_INLINE Moments moments(const Row& row, bool center) {
    v128_t m1 = wasm_i32x4_const_splat(0), m2 = m1;
    for (std::int64_t c = 0; c < row.channels; c += LANES) {
        v128_t v[2];
        row.shifted<wide>(c, v);
        for (int i = 0; i < 2; ++i) {
            m1 = wasm_i32x4_add(m1, v[i]);  // fits in i32: C * |v| < 2^31
            m2 = add_high(add_low(m2, v[i], v[i]), v[i], v[i]);
        }
    }
    return {center ? sum_of_i32(m1) : 0, sum_of_i64(m2)};
}

template <bool wide>
FQVIT_SIMD_INLINE Moments per_tensor_moments(const Row& row, bool center) {
    const v128_t ones = wasm_i16x8_const_splat(1);
    v128_t m1 = wasm_i32x4_const_splat(0), m2 = m1;
    for (std::int64_t c = 0; c < row.channels; c += LANES) {
        const v128_t v = row.centered<wide>(c);
        m1 = wasm_i32x4_add(m1, wasm_i32x4_dot_i16x8(v, ones));
        const v128_t squares = wasm_i32x4_dot_i16x8(v, v);  // sums of two squares: at most 2^31, read as unsigned
        m2 = wasm_i64x2_add(m2, wasm_u64x2_extend_low_u32x4(squares));
        m2 = wasm_i64x2_add(m2, wasm_u64x2_extend_high_u32x4(squares));
    }
    return {center ? sum_of_i32(m1) : 0, sum_of_i64(m2)};
}

// t = round(n * 2^s / d) exactly, for 2^30 <= d < 2^31, s = 24 + j and |t| < 2^30.
//
// The estimate q = round(n * rho / 2^k) with k = 61 - s and rho = round(2^61 / d) <= 2^31 - 1 is less than 1 away from
// n * 2^s / d: rho is at most 1/2 too large or too small (or 1 too small if d = 2^30), so that the product before its
// rounding is wrong by less than 1/2. Hence u = n * 2^s - q * d + d satisfies 0 < u < 2 * d < 2^32, and u modulo 2^32
// determines t: t = q - 1 if n * 2^s - q * d < -floor(d / 2), t = q + 1 if n * 2^s - q * d >= d - floor(d / 2), and
// otherwise t = q.
struct Divider {
    v128_t count, sum;    // n = count * v - sum
    v128_t rho, left, d;  // left: 2^s modulo 2^32
    v128_t start, top;    // 2^62 + 2^(k - 1) makes n * rho positive and rounds it; 2^(62 - k) is subtracted afterwards
    v128_t small, large;  // u < small: t = q - 1; u >= large: t = q + 1
    std::uint32_t right, y_right;  // k, shift - 32

    Divider(const Norm& norm, Moments m) {
        const std::int64_t big_d = norm.channels * m.squares - m.sum * m.sum + norm.epsilon;
        const int j = (61 - (63 - __builtin_clzll(static_cast<std::uint64_t>(big_d)))) >> 1;
        const int s = 24 + j, k = 61 - s;
        const std::int64_t root = isqrt_normalized(static_cast<std::uint64_t>(big_d) << 2 * j);
        const std::int64_t reciprocal = ((std::int64_t{1} << 61) + root / 2) / root;
        const auto splat = [](std::int64_t value) { return wasm_i32x4_splat(static_cast<std::int32_t>(value)); };
        count = splat(norm.channels), sum = splat(m.sum);
        rho = splat(reciprocal < 0x7fffffff ? reciprocal : 0x7fffffff);
        left = splat(std::int64_t{1} << s), d = splat(root);
        start = wasm_i64x2_splat((std::int64_t{1} << 62) + (std::int64_t{1} << (k - 1)));
        top = splat(std::int64_t{1} << (62 - k));
        const std::int64_t half = root - root / 2;
        small = splat(half), large = splat(root + half);
        right = static_cast<std::uint32_t>(k), y_right = static_cast<std::uint32_t>(norm.shift - 32);
    }

    // (t * g + b) >> shift of four channels with v = (x - zero) * 2^alpha, for shift >= 32
    FQVIT_SIMD_INLINE v128_t operator()(v128_t v, const std::int32_t* g_at, const std::int64_t* b_at) const {
        const v128_t n = wasm_i32x4_sub(wasm_i32x4_mul(v, count), sum);
        const v128_t low = wasm_u64x2_shr(add_low(start, n, rho), right);
        const v128_t high = wasm_u64x2_shr(add_high(start, n, rho), right);
        v128_t t = wasm_i32x4_sub(low_halves(low, high), top);
        const v128_t u = wasm_i32x4_sub(wasm_i32x4_add(wasm_i32x4_mul(n, left), d), wasm_i32x4_mul(t, d));
        t = wasm_i32x4_add(t, wasm_u32x4_lt(u, small));
        t = wasm_i32x4_sub(t, wasm_u32x4_ge(u, large));
        const v128_t g = wasm_v128_load(g_at);
        const v128_t y_low = add_low(wasm_v128_load(b_at), t, g), y_high = add_high(wasm_v128_load(b_at + 2), t, g);
        return wasm_i32x4_shr(high_halves(y_low, y_high), y_right);
    }
};

template <bool per_tensor, bool wide_in, bool wide_out>
void layernorm_rows(const Norm& norm, const std::int32_t* power, const std::uint8_t* x, std::uint8_t* y,
                    std::int64_t rows) {
    const auto last = static_cast<std::int32_t>(norm.last);
    const std::int32_t* g = norm.g;
    const std::int64_t* b = norm.b;
    for (; rows > 0; --rows, x += norm.channels * (wide_in ? 2 : 1), y += norm.channels * (wide_out ? 2 : 1)) {
        const Row row{x, norm.zero, power, norm.channels, norm.offset};
        const Divider divide(
            norm, per_tensor ? per_tensor_moments<wide_in>(row, norm.center) : moments<wide_in>(row, norm.center));
        for (std::int64_t c = 0; c < row.channels; c += LANES) {
            v128_t v[2];
            if constexpr (per_tensor) {
                const v128_t words = row.centered<wide_in>(c);
                v[0] = wasm_i32x4_extend_low_i16x8(words), v[1] = wasm_i32x4_extend_high_i16x8(words);
            } else {
                row.shifted<wide_in>(c, v);
            }
            store_codes(divide(v[0], g + c, b + c), divide(v[1], g + c + 4, b + c + 4), last, wide_out, y, c);
        }
    }
}

using Normalize = void (*)(const Norm&, const std::int32_t*, const std::uint8_t*, std::uint8_t*, std::int64_t);

template <bool per_tensor>
Normalize choose_rows(const Norm& norm) {
    if (norm.wide_in) {
        return norm.wide_out ? layernorm_rows<per_tensor, true, true> : layernorm_rows<per_tensor, true, false>;
    }
    return norm.wide_out ? layernorm_rows<per_tensor, false, true> : layernorm_rows<per_tensor, false, false>;
}

}  // namespace

void layernorm_simd128(const Norm& norm, const void* x, void* y, std::int64_t rows) {
    if (!norm.fits_i32 || norm.channels % LANES != 0 || norm.channels > MAX_CHANNELS) {
        kernels_scalar()->layernorm(norm, x, y, rows);
        return;
    }
    alignas(16) std::int32_t power[MAX_CHANNELS];
    for (std::int64_t c = 0; c < norm.channels && !norm.per_tensor; ++c) power[c] = 1 << norm.alpha[c];
    const Normalize normalize = norm.per_tensor ? choose_rows<true>(norm) : choose_rows<false>(norm);
    normalize(norm, power, static_cast<const std::uint8_t*>(x), static_cast<std::uint8_t*>(y), rows);
}

}  // namespace fqvit

#endif
