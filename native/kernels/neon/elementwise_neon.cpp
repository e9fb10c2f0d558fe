// Multiply, rotary, depthwise, max and mean with NEON, 8 channels at a time. elementwise.h has the formulas.
//
// Exact because the ops prove that every accumulator is below 2^31. The scalar kernels handle parameters that the
// vector code does not support. Elements past the last multiple of 8 are computed by a vector that overlaps the one
// before it, which is safe because y never shares memory with an input.
#include "kernels/elementwise.h"

#if defined(__aarch64__) && defined(__GNUC__)

#include <algorithm>

#include "kernels/neon/neon.h"

namespace fqvit {
namespace {

using namespace neon;

constexpr std::int64_t LANES = 8;

// Calls step(i) for i = 0, 8, 16, ..., the last time for the last 8 of `count` >= 8 elements.
template <class Step>
FQVIT_NEON_INLINE void for_eights(std::int64_t count, const Step& step) {
    for (std::int64_t i = 0; i < count; i += LANES) step(std::min(i, count - LANES));
}

// 8 codes minus a zero point, as i32.
FQVIT_NEON_INLINE void load_centered(const void* x, bool wide, std::int64_t at, int32x4_t zero, int32x4_t (&to)[2]) {
    widen(load_codes(x, wide, at), to);
    to[0] = vsubq_s32(to[0], zero), to[1] = vsubq_s32(to[1], zero);
}

// Requantizes and stores 8 accumulators.
struct Requantizer {
    RequantizeHigh high;
    int32x4_t lift, zero;
    std::int32_t last;
    bool wide;

    explicit Requantizer(const TensorRequantization& q)
        : high(RequantizeHigh::per_tensor(q.vector_mult, q.vector_shift)),
          lift(vdupq_n_s32(q.lift)),
          zero(vdupq_n_s32(q.zero)),
          last(q.last),
          wide(q.wide) {}

    FQVIT_NEON_INLINE void store(int32x4_t a, int32x4_t b, void* y, std::int64_t at) const {
        store_codes(vqaddq_s32(high(vshlq_s32(a, lift)), zero), vqaddq_s32(high(vshlq_s32(b, lift)), zero), last, wide,
                    y, at);
    }
};

void multiply(const Product& product, const void* a, const void* b, void* y, std::int64_t count) {
    if (product.requantization.vector_shift == 0 || count < LANES) {
        elementwise_scalar.multiply(product, a, b, y, count);
        return;
    }
    const Requantizer requantizer(product.requantization);
    const int32x4_t a_zero = vdupq_n_s32(product.a_zero), b_zero = vdupq_n_s32(product.b_zero);
    for_eights(count, [&](std::int64_t i) {
        int32x4_t left[2], right[2];
        load_centered(a, product.wide_a, i, a_zero, left);
        load_centered(b, product.wide_b, i, b_zero, right);
        requantizer.store(vmulq_s32(left[0], right[0]), vmulq_s32(left[1], right[1]), y, i);
    });
}

// Loads the 8 codes that start at `at` and returns them in the order given by the positions `lane`.
struct Picker {
    uint8x8_t bytes;
    uint8x16_t words;

    explicit Picker(const std::int32_t* lane) {
        std::uint8_t byte[8], word[16];
        for (int i = 0; i < 8; ++i) {
            byte[i] = static_cast<std::uint8_t>(lane[i]);
            word[2 * i] = static_cast<std::uint8_t>(2 * lane[i]);
            word[2 * i + 1] = static_cast<std::uint8_t>(2 * lane[i] + 1);
        }
        bytes = vld1_u8(byte), words = vld1q_u8(word);
    }

    FQVIT_NEON_INLINE uint16x8_t operator()(const void* x, bool wide, std::int64_t at) const {
        if (!wide) return vmovl_u8(vtbl1_u8(vld1_u8(static_cast<const std::uint8_t*>(x) + at), bytes));
        const uint16x8_t near = vld1q_u16(static_cast<const std::uint16_t*>(x) + at);
        return vreinterpretq_u16_u8(vqtbl1q_u8(vreinterpretq_u8_u16(near), words));
    }
};

void rotary(const Rotation& rotation, const std::int32_t* table, const void* x, void* y) {
    if (rotation.requantization.vector_shift == 0 || !rotation.by_eights) {
        elementwise_scalar.rotary(rotation, table, x, y);
        return;
    }
    const Requantizer requantizer(rotation.requantization);
    const int32x4_t zero = vdupq_n_s32(rotation.zero);
    for (std::int64_t p = 0; p < rotation.period; p += LANES) {
        const int16x8_t angles[2] = {vreinterpretq_s16_s32(vld1q_s32(table + p)),
                                     vreinterpretq_s16_s32(vld1q_s32(table + p + 4))};
        const int16x8_t cosine = vuzp1q_s16(angles[0], angles[1]), sine = vuzp2q_s16(angles[0], angles[1]);
        const Picker pick(rotation.lane + p);
        const std::int64_t distance = rotation.first[p / LANES] - p;
        for (std::int64_t c = p; c < rotation.channels; c += rotation.period) {
            int32x4_t own[2], other[2];
            load_centered(x, rotation.wide_in, c, zero, own);
            widen(pick(x, rotation.wide_in, c + distance), other);
            other[0] = vsubq_s32(other[0], zero), other[1] = vsubq_s32(other[1], zero);
            const int32x4_t low =
                vmlaq_s32(vmulq_s32(own[0], vmovl_s16(vget_low_s16(cosine))), other[0], vmovl_s16(vget_low_s16(sine)));
            const int32x4_t high = vmlaq_s32(vmulq_s32(own[1], vmovl_high_s16(cosine)), other[1], vmovl_high_s16(sine));
            requantizer.store(low, high, y, c);
        }
    }
}

template <bool wide>
void depthwise_vectors(const Taps& taps, const std::uint8_t* const* rows, std::int32_t* acc) {
    for_eights(taps.channels, [&](std::int64_t c) {
        int32x4_t low = vdupq_n_s32(0), high = low;
        for (std::int64_t pair = 0; pair < taps.pairs; ++pair) {
            const std::int32_t* at = taps.weights + pair * taps.channels + c;
            const int16x8_t left = vreinterpretq_s16_s32(vld1q_s32(at)),
                            right = vreinterpretq_s16_s32(vld1q_s32(at + 4));
            const int16x8_t weights[2] = {vuzp1q_s16(left, right), vuzp2q_s16(left, right)};
            for (int i = 0; i < 2; ++i) {
                const uint16x8_t codes = load_codes(rows[2 * pair + i], wide, c);
                if constexpr (wide) {
                    int32x4_t v[2];
                    widen(codes, v);
                    low = vmlaq_s32(low, v[0], vmovl_s16(vget_low_s16(weights[i])));
                    high = vmlaq_s32(high, v[1], vmovl_high_s16(weights[i]));
                } else {
                    const int16x8_t v = vreinterpretq_s16_u16(codes);
                    low = vmlal_s16(low, vget_low_s16(v), vget_low_s16(weights[i]));
                    high = vmlal_high_s16(high, v, weights[i]);
                }
            }
        }
        vst1q_s32(acc + c, low);
        vst1q_s32(acc + c + 4, high);
    });
}

void depthwise(const Taps& taps, const std::uint8_t* const* rows, std::int32_t* acc) {
    if (taps.channels < LANES) {
        elementwise_scalar.depthwise(taps, rows, acc);
    } else {
        (taps.wide_in ? depthwise_vectors<true> : depthwise_vectors<false>)(taps, rows, acc);
    }
}

// Vectors of 16 bytes; the last one overlaps the one before it.
template <bool wide>
void max_vectors(const Rows& rows, const std::uint8_t* x, std::uint8_t* y, std::int64_t count) {
    constexpr std::int64_t SIZE = wide ? 2 : 1, STEP = 16;
    const std::int64_t bytes = count * SIZE, stride = rows.stride * SIZE;
    for (std::int64_t i = 0; i < bytes; i += STEP) {
        const std::int64_t at = std::min(i, bytes - STEP);
        uint8x16_t most = vld1q_u8(x + at);
        for (std::int64_t r = 1; r < rows.count; ++r) {
            const uint8x16_t code = vld1q_u8(x + r * stride + at);
            if constexpr (wide) {
                most = vreinterpretq_u8_u16(vmaxq_u16(vreinterpretq_u16_u8(most), vreinterpretq_u16_u8(code)));
            } else {
                most = vmaxq_u8(most, code);
            }
        }
        vst1q_u8(y + at, most);
    }
}

void max(const Rows& rows, const void* x, void* y, std::int64_t count) {
    if (count * (rows.wide_in ? 2 : 1) < 16) {
        elementwise_scalar.max(rows, x, y, count);
    } else {
        (rows.wide_in ? max_vectors<true> : max_vectors<false>)(rows, static_cast<const std::uint8_t*>(x),
                                                                static_cast<std::uint8_t*>(y), count);
    }
}

// A sum of codes may exceed 32 bits and wrap around. The result is exact nevertheless, because it fits in 32 bits after
// the zero points are subtracted.
void mean(const Average& average, const void* x, void* y, std::int64_t channel, std::int64_t count) {
    if (average.requantization.vector_shift == 0 || count < LANES) {
        elementwise_scalar.mean(average, x, y, channel, count);
        return;
    }
    const Requantizer requantizer(average.requantization);
    const Rows& rows = average.rows;
    for_eights(count, [&](std::int64_t c) {
        uint32x4_t sum[2] = {vdupq_n_u32(0), vdupq_n_u32(0)};
        for (std::int64_t r = 0; r < rows.count; ++r) {
            const uint16x8_t codes = load_codes(x, rows.wide_in, r * rows.stride + c);
            sum[0] = vaddw_u16(sum[0], vget_low_u16(codes));
            sum[1] = vaddw_high_u16(sum[1], codes);
        }
        int32x4_t acc[2];
        for (int i = 0; i < 2; ++i) {
            const std::int64_t at = channel + c + 4 * i;
            const uint32x4_t zero = vreinterpretq_u32_s32(vld1q_s32(average.zero + at));
            const uint32x4_t centered = vmlsq_n_u32(sum[i], zero, static_cast<std::uint32_t>(rows.count));
            acc[i] = vshlq_s32(vreinterpretq_s32_u32(centered), vld1q_s32(average.alpha + at));
        }
        requantizer.store(acc[0], acc[1], y, c);
    });
}

// Not vectorized: no model that was measured on AArch64 uses it.
void center(const Centering& centering, const void* x, std::int32_t* acc, std::int64_t channels) {
    elementwise_scalar.center(centering, x, acc, channels);
}

}  // namespace

constexpr ElementwiseKernels elementwise_neon = {multiply, rotary, depthwise, max, mean, center};

}  // namespace fqvit

#endif
