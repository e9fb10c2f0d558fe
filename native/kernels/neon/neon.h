// Helpers shared by the NEON kernels. They use instructions that every AArch64 CPU has.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#define FQVIT_NEON_INLINE __attribute__((always_inline)) inline

namespace fqvit::neon {

// round_shift(acc * mult, shift) of 4 lanes for shift >= 32, in two instructions.
//
// sqdmulh gives h = floor(acc * mult / 2^31), and srshl then rounds: floor((h + 2^(shift - 32)) / 2^(shift - 31)). This
// equals floor((acc * mult + 2^(shift - 1)) / 2^shift), because 2^(shift - 1) is a multiple of 2^31. sqdmulh cannot
// saturate, because mult is not -2^31.
struct RequantizeHigh {
    int32x4_t mult, right;  // right: 31 - shift, a negative left shift

    FQVIT_NEON_INLINE int32x4_t operator()(int32x4_t acc) const { return vrshlq_s32(vqdmulhq_s32(acc, mult), right); }

    // One multiplier and one shift >= 32 for all lanes.
    FQVIT_NEON_INLINE static RequantizeHigh per_tensor(std::int64_t mult, int shift) {
        return {vdupq_n_s32(static_cast<std::int32_t>(mult)), vdupq_n_s32(31 - shift)};
    }
};

// Rounds and shifts four i64 values for any shift, and saturates them to i32. right: negative left shifts, as above.
// srshl adds the rounding constant without overflow.
FQVIT_NEON_INLINE int32x4_t round_shift(int64x2_t low, int64x2_t high, int64x2_t right_low, int64x2_t right_high) {
    return vqmovn_high_s64(vqmovn_s64(vrshlq_s64(low, right_low)), vrshlq_s64(high, right_high));
}

// 8 codes -> i32
FQVIT_NEON_INLINE void widen(uint16x8_t codes, int32x4_t (&to)[2]) {
    to[0] = vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(codes)));
    to[1] = vreinterpretq_s32_u32(vmovl_high_u16(codes));
}

// Loads 8 codes of u8 or u16.
FQVIT_NEON_INLINE uint16x8_t load_codes(const void* x, bool wide, std::int64_t at) {
    return wide ? vld1q_u16(static_cast<const std::uint16_t*>(x) + at)
                : vmovl_u8(vld1_u8(static_cast<const std::uint8_t*>(x) + at));
}

// 8 x i32 -> 8 x u8, saturated to 0..last after zero is added. zero: 0..255.
FQVIT_NEON_INLINE uint8x8_t to_u8(int32x4_t low, int32x4_t high, int16x8_t zero, uint8x8_t last) {
    const int16x8_t words = vqmovn_high_s32(vqmovn_s32(low), high);
    return vmin_u8(vqmovun_s16(vqaddq_s16(words, zero)), last);
}

// The same to u16, where the zero point is already added.
FQVIT_NEON_INLINE uint16x8_t to_u16(int32x4_t low, int32x4_t high, uint16x8_t last) {
    return vminq_u16(vqmovun_high_s32(vqmovun_s32(low), high), last);
}

// Saturates 8 codes to 0..last and stores them.
FQVIT_NEON_INLINE void store_codes(int32x4_t low, int32x4_t high, std::int32_t last, bool wide, void* y,
                                   std::int64_t at) {
    if (wide) {
        vst1q_u16(static_cast<std::uint16_t*>(y) + at,
                  to_u16(low, high, vdupq_n_u16(static_cast<std::uint16_t>(last))));
    } else {
        vst1_u8(static_cast<std::uint8_t*>(y) + at,
                to_u8(low, high, vdupq_n_s16(0), vdup_n_u8(static_cast<std::uint8_t>(last))));
    }
}

// Loads 16 bytes, or only the first `count` of them, followed by zeros.
FQVIT_NEON_INLINE uint8x16_t load_some(const std::uint8_t* p, std::int64_t count) {
    if (count >= 16) return vld1q_u8(p);
    std::uint8_t copy[16] = {};
    std::memcpy(copy, p, static_cast<std::size_t>(count));
    return vld1q_u8(copy);
}

// Looks up 16 bytes in a table of 64 * blocks entries. tbl gives 0 and tbx keeps its operand for indices past 63.
template <int blocks>
struct ByteTable {
    uint8x16x4_t entries[blocks];

    FQVIT_NEON_INLINE explicit ByteTable(const std::uint8_t* table) {
        for (int i = 0; i < blocks; ++i) entries[i] = vld1q_u8_x4(table + 64 * i);
    }

    FQVIT_NEON_INLINE uint8x16_t operator()(uint8x16_t index) const {
        uint8x16_t found = vqtbl4q_u8(entries[0], index);
        for (int i = 1; i < blocks; ++i) {
            index = vsubq_u8(index, vdupq_n_u8(64));
            found = vqtbx4q_u8(found, entries[i], index);
        }
        return found;
    }
};

}  // namespace fqvit::neon
