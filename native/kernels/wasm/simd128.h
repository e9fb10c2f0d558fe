// Helpers shared by the SIMD128 kernels for WebAssembly.
#pragma once

#include <wasm_simd128.h>

#include <cstdint>
#include <cstring>

#define FQVIT_SIMD_INLINE __attribute__((always_inline)) inline

namespace fqvit::simd128 {

// The high halves of four 64-bit sums, in order.
FQVIT_SIMD_INLINE v128_t high_halves(v128_t low, v128_t high) { return wasm_i32x4_shuffle(low, high, 1, 3, 5, 7); }
FQVIT_SIMD_INLINE v128_t low_halves(v128_t low, v128_t high) { return wasm_i32x4_shuffle(low, high, 0, 2, 4, 6); }

// Two 64-bit sums, each of a 64-bit start value and the product of two i32 lanes.
FQVIT_SIMD_INLINE v128_t add_low(v128_t start, v128_t a, v128_t b) {
    return wasm_i64x2_add(start, wasm_i64x2_extmul_low_i32x4(a, b));
}
FQVIT_SIMD_INLINE v128_t add_high(v128_t start, v128_t a, v128_t b) {
    return wasm_i64x2_add(start, wasm_i64x2_extmul_high_i32x4(a, b));
}

// round_shift(acc * mult, shift) of 4 lanes for one multiplier and one shift >= 32: adds 2^(shift - 1) to the product
// and shifts the high half of the sum right by shift - 32.
struct RequantizeHigh {
    v128_t mult, half;
    int right;  // shift - 32

    FQVIT_SIMD_INLINE v128_t operator()(v128_t acc) const {
        return wasm_i32x4_shr(high_halves(add_low(half, acc, mult), add_high(half, acc, mult)),
                              static_cast<std::uint32_t>(right));
    }

    static RequantizeHigh per_tensor(std::int64_t mult, int shift) {
        return {wasm_i32x4_splat(static_cast<std::int32_t>(mult)), wasm_i64x2_splat(std::int64_t{1} << (shift - 1)),
                shift - 32};
    }
};

// 8 codes of u8 or u16 -> 8 x u16
FQVIT_SIMD_INLINE v128_t load_codes(const void* x, bool wide, std::int64_t at) {
    return wide ? wasm_v128_load(static_cast<const std::uint16_t*>(x) + at)
                : wasm_u16x8_load8x8(static_cast<const std::uint8_t*>(x) + at);
}

// 8 x i32 -> 8 codes saturated to 0..last, stored as u8 or u16.
FQVIT_SIMD_INLINE void store_codes(v128_t low, v128_t high, std::int32_t last, bool wide, void* y, std::int64_t at) {
    if (wide) {
        const v128_t limit = wasm_i16x8_splat(static_cast<std::int16_t>(last));
        wasm_v128_store(static_cast<std::uint16_t*>(y) + at, wasm_u16x8_min(wasm_u16x8_narrow_i32x4(low, high), limit));
    } else {
        const v128_t words = wasm_i16x8_narrow_i32x4(low, high);
        const v128_t limit = wasm_i8x16_splat(static_cast<std::int8_t>(last));
        wasm_v128_store64_lane(static_cast<std::uint8_t*>(y) + at,
                               wasm_u8x16_min(wasm_u8x16_narrow_i16x8(words, words), limit), 0);
    }
}

// 16 x i32 -> 16 x u8, saturated to 0..last.
FQVIT_SIMD_INLINE v128_t to_u8(v128_t a, v128_t b, v128_t c, v128_t d, v128_t last) {
    const v128_t codes = wasm_u8x16_narrow_i16x8(wasm_i16x8_narrow_i32x4(a, b), wasm_i16x8_narrow_i32x4(c, d));
    return wasm_u8x16_min(codes, last);
}

// Loads 16 bytes, or only the first `count` of them, followed by zeros.
FQVIT_SIMD_INLINE v128_t load_some(const std::uint8_t* p, std::int64_t count) {
    if (count >= 16) return wasm_v128_load(p);
    std::uint8_t copy[16] = {};
    std::memcpy(copy, p, static_cast<std::size_t>(count));
    return wasm_v128_load(copy);
}

}  // namespace fqvit::simd128
