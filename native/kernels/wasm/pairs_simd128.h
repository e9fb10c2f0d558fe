// The micro-kernel of all products: pairs of i16 multiplied by i32x4.dot_i16x8_s, which adds both products in i32.
//     out[r][c] = sum over pairs p of (a[p][r][0] * b[p][c][0] + a[p][r][1] * b[p][c][1])
// One pair of a row is broadcast and multiplied by the pairs of 8 columns.
//
// Tile: 4 rows x 8 columns. 8 accumulators, 2 vectors of columns, a broadcast pair and a product: 12 registers. Larger
// tiles and unrolled loops are slower in V8, whose register allocator then spills.
#pragma once

#include <utility>

#include "kernels/wasm/simd128.h"

namespace fqvit::simd128 {

constexpr int TILE_ROWS = 4, TILE_COLUMNS = 8;

template <int offset>
FQVIT_SIMD_INLINE void add_pair(v128_t& left, v128_t& right, const std::int16_t* a, v128_t b_left, v128_t b_right) {
    const v128_t pair = wasm_v128_load32_splat(a + offset);
    left = wasm_i32x4_add(left, wasm_i32x4_dot_i16x8(pair, b_left));
    right = wasm_i32x4_add(right, wasm_i32x4_dot_i16x8(pair, b_right));
    // The compiler does not move loads across this. Otherwise it loads all rows first, which needs more registers.
    asm volatile("" ::: "memory");
}

// a: i16, `row` elements between rows and `next` between pairs of a row   b: i16 [pairs][8][2]
// stride: elements between rows of out
template <int row, int next, int... r>
FQVIT_SIMD_INLINE void multiply_rows(std::integer_sequence<int, r...>, const std::int16_t* a, const std::int16_t* b,
                                     std::int64_t pairs, std::int32_t* out, std::int64_t stride) {
    v128_t left[sizeof...(r)] = {((void)r, wasm_i32x4_const_splat(0))...};
    v128_t right[sizeof...(r)] = {((void)r, wasm_i32x4_const_splat(0))...};
    for (auto remaining = static_cast<std::int32_t>(pairs); remaining > 0; --remaining) {
        const v128_t b_left = wasm_v128_load(b), b_right = wasm_v128_load(b + 8);
        (add_pair<row * r>(left[r], right[r], a, b_left, b_right), ...);
        a += next, b += 2 * TILE_COLUMNS;
    }
    ((wasm_v128_store(out + r * stride, left[r]), wasm_v128_store(out + r * stride + 4, right[r])), ...);
}

template <int row, int next, int rows>
void multiply_tile(const std::int16_t* a, const std::int16_t* b, std::int64_t pairs, std::int32_t* out,
                   std::int64_t stride) {
    multiply_rows<row, next>(std::make_integer_sequence<int, rows>(), a, b, pairs, out, stride);
}

using MicroKernel = void (*)(const std::int16_t*, const std::int16_t*, std::int64_t, std::int32_t*, std::int64_t);
template <int row, int next>
constexpr MicroKernel BY_ROWS[TILE_ROWS + 1] = {nullptr, multiply_tile<row, next, 1>, multiply_tile<row, next, 2>,
                                                multiply_tile<row, next, 3>, multiply_tile<row, next, 4>};

}  // namespace fqvit::simd128
