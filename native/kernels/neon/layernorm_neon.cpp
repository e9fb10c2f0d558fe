// LayerNorm with NEON, 8 channels at a time. kernels.h has the formula.
//
// Exact because sums of squares and products with g have 64 bits, and because divisions are corrected by their
// remainder (Divider). The scalar kernel handles parameters that the vector code does not support.
#if defined(__aarch64__) && defined(__GNUC__)

#include "kernels/isqrt.h"
#include "kernels/neon/kernels_neon.h"
#include "kernels/neon/neon.h"

namespace fqvit {
namespace {

using namespace neon;

constexpr int LANES = 8;

// Copies of the arguments that the loops over a row read. The compiler keeps them in registers; it would have to read
// the originals again after every store of codes, which might have changed them.
struct Row {
    const void* x;
    const std::int32_t *zero, *alpha, *g;
    const std::int64_t* b;
    std::int64_t channels;
    std::int16_t offset;

    Row(const Norm& norm, const void* from)
        : x(from),
          zero(norm.zero),
          alpha(norm.alpha),
          g(norm.g),
          b(norm.b),
          channels(norm.channels),
          offset(norm.offset) {}

    // (x - zero) * 2^alpha of 8 channels, as i32
    template <bool wide>
    FQVIT_NEON_INLINE void shifted(std::int64_t c, int32x4_t (&v)[2]) const {
        widen(load_codes(x, wide, c), v);
        for (int i = 0; i < 2; ++i) {
            v[i] = vshlq_s32(vsubq_s32(v[i], vld1q_s32(zero + c + 4 * i)), vld1q_s32(alpha + c + 4 * i));
        }
    }
    // 8 codes minus the offset, as i16.
    template <bool wide>
    FQVIT_NEON_INLINE int16x8_t centered(std::int64_t c) const {
        return vsubq_s16(vreinterpretq_s16_u16(load_codes(x, wide, c)), vdupq_n_s16(offset));
    }
};

// M1 = sum v and M2 = sum v^2 of a row.
struct Moments {
    std::int64_t sum, squares;
};

template <bool wide>
FQVIT_NEON_INLINE Moments moments(const Row& row, bool center) {
    int32x4_t m1 = vdupq_n_s32(0);
    int64x2_t m2 = vdupq_n_s64(0);
    for (std::int64_t c = 0; c < row.channels; c += LANES) {
        int32x4_t v[2];
        row.shifted<wide>(c, v);
        for (int i = 0; i < 2; ++i) {
            m1 = vaddq_s32(m1, v[i]);  // fits in i32: C * |v| < 2^31
            m2 = vmlal_high_s32(vmlal_s32(m2, vget_low_s32(v[i]), vget_low_s32(v[i])), v[i], v[i]);
        }
    }
    return {center ? vaddlvq_s32(m1) : 0, vaddvq_s64(m2)};
}

template <bool wide>
FQVIT_NEON_INLINE Moments per_tensor_moments(const Row& row, bool center) {
    int32x4_t m1 = vdupq_n_s32(0);
    int64x2_t m2 = vdupq_n_s64(0);
    for (std::int64_t c = 0; c < row.channels; c += LANES) {
        const int16x8_t v = row.centered<wide>(c);
        m1 = vpadalq_s16(m1, v);
        m2 = vpadalq_s32(m2, vmull_s16(vget_low_s16(v), vget_low_s16(v)));
        m2 = vpadalq_s32(m2, vmull_high_s16(v, v));
    }
    return {center ? vaddlvq_s32(m1) : 0, vaddvq_s64(m2)};
}

// t = round(n * 2^s / d) exactly, for 2^30 <= d < 2^31, s = 24 + j and |t| < 2^30.
//
// The estimate q = round(n * rho / 2^(61 - s)) with rho = round(2^61 / d) <= 2^31 - 1 is less than 1 away from
// n * 2^s / d: rho is at most 1/2 too large or too small (or 1 too small if d = 2^30), so that the product before its
// rounding is wrong by less than 1/2. Hence u = n * 2^s - q * d + d satisfies 0 < u < 2 * d < 2^32, and u modulo 2^32
// determines t: t = q - 1 if n * 2^s - q * d < -floor(d / 2), t = q + 1 if n * 2^s - q * d >= d - floor(d / 2), and
// otherwise t = q.
struct Divider {
    int32x4_t count, sum;     // n = count * v - sum
    int32x4_t rho, left, d;   // left: s
    int64x2_t right;          // s - 61, a negative left shift
    uint32x4_t small, large;  // u < small: t = q - 1; u >= large: t = q + 1
    int32x4_t y_right;        // 32 - shift

    Divider(const Norm& norm, Moments m) {
        const std::int64_t big_d = norm.channels * m.squares - m.sum * m.sum + norm.epsilon;
        const int j = (61 - (63 - __builtin_clzll(static_cast<std::uint64_t>(big_d)))) >> 1;
        const std::int64_t root = isqrt_normalized(static_cast<std::uint64_t>(big_d) << 2 * j);
        const std::int64_t reciprocal = ((std::int64_t{1} << 61) + root / 2) / root;
        count = vdupq_n_s32(static_cast<std::int32_t>(norm.channels));
        sum = vdupq_n_s32(static_cast<std::int32_t>(m.sum));
        rho = vdupq_n_s32(static_cast<std::int32_t>(reciprocal < 0x7fffffff ? reciprocal : 0x7fffffff));
        left = vdupq_n_s32(24 + j), right = vdupq_n_s64(24 + j - 61);
        d = vdupq_n_s32(static_cast<std::int32_t>(root));
        const auto half = static_cast<std::uint32_t>(root - root / 2);
        small = vdupq_n_u32(half), large = vdupq_n_u32(static_cast<std::uint32_t>(root) + half);
        y_right = vdupq_n_s32(32 - norm.shift);
    }

    // (t * g + b) >> shift of four channels with v = (x - zero) * 2^alpha, for shift >= 32
    FQVIT_NEON_INLINE int32x4_t operator()(int32x4_t v, const std::int32_t* g_at, const std::int64_t* b_at) const {
        const int32x4_t n = vsubq_s32(vmulq_s32(v, count), sum);
        const int64x2_t low = vrshlq_s64(vmull_s32(vget_low_s32(n), vget_low_s32(rho)), right);
        const int64x2_t high = vrshlq_s64(vmull_high_s32(n, rho), right);
        int32x4_t t = vuzp1q_s32(vreinterpretq_s32_s64(low), vreinterpretq_s32_s64(high));
        const uint32x4_t u = vreinterpretq_u32_s32(vmlsq_s32(vaddq_s32(vshlq_s32(n, left), d), t, d));
        t = vaddq_s32(t, vreinterpretq_s32_u32(vcltq_u32(u, small)));
        t = vsubq_s32(t, vreinterpretq_s32_u32(vcgeq_u32(u, large)));
        const int32x4_t g = vld1q_s32(g_at);
        const int64x2_t y_low = vmlal_s32(vld1q_s64(b_at), vget_low_s32(t), vget_low_s32(g));
        const int64x2_t y_high = vmlal_high_s32(vld1q_s64(b_at + 2), t, g);
        return vshlq_s32(vuzp2q_s32(vreinterpretq_s32_s64(y_low), vreinterpretq_s32_s64(y_high)), y_right);
    }
};

template <bool per_tensor, bool wide_in, bool wide_out>
void layernorm_rows(const Norm& norm, const std::uint8_t* x, std::uint8_t* y, std::int64_t rows) {
    const auto last = static_cast<std::int32_t>(norm.last);
    for (; rows > 0; --rows, x += norm.channels * (wide_in ? 2 : 1), y += norm.channels * (wide_out ? 2 : 1)) {
        const Row row(norm, x);
        const Divider divide(
            norm, per_tensor ? per_tensor_moments<wide_in>(row, norm.center) : moments<wide_in>(row, norm.center));
        for (std::int64_t c = 0; c < row.channels; c += LANES) {
            int32x4_t v[2];
            if constexpr (per_tensor) {
                const int16x8_t words = row.centered<wide_in>(c);
                v[0] = vmovl_s16(vget_low_s16(words)), v[1] = vmovl_high_s16(words);
            } else {
                row.shifted<wide_in>(c, v);
            }
            store_codes(divide(v[0], row.g + c, row.b + c), divide(v[1], row.g + c + 4, row.b + c + 4), last, wide_out,
                        y, c);
        }
    }
}

using Normalize = void (*)(const Norm&, const std::uint8_t*, std::uint8_t*, std::int64_t);

template <bool per_tensor>
Normalize choose_rows(const Norm& norm) {
    if (norm.wide_in) {
        return norm.wide_out ? layernorm_rows<per_tensor, true, true> : layernorm_rows<per_tensor, true, false>;
    }
    return norm.wide_out ? layernorm_rows<per_tensor, false, true> : layernorm_rows<per_tensor, false, false>;
}

}  // namespace

void layernorm_neon(const Norm& norm, const void* x, void* y, std::int64_t rows) {
    if (!norm.fits_i32 || norm.channels % LANES != 0) {
        kernels_scalar()->layernorm(norm, x, y, rows);
        return;
    }
    const Normalize normalize = norm.per_tensor ? choose_rows<true>(norm) : choose_rows<false>(norm);
    normalize(norm, static_cast<const std::uint8_t*>(x), static_cast<std::uint8_t*>(y), rows);
}

}  // namespace fqvit

#endif
