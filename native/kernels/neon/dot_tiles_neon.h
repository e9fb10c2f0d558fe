// Micro-kernels that multiply four adjacent bytes (a quad) per lane, and the GEMM that uses them.
//
// gemm_neon.cpp and gemm_neon_dotprod.cpp include this file. Before that, they define
//     FQVIT_TARGET                        the target attribute of every function below
//     dot_s8<lane>(acc, w, x)             acc[i] + the dot product of quad i of w and quad `lane` of x, i8
//     dot_u8<lane>(acc, w, x)             the same for u8
//
// GEMM: activations are u8, so packing stores x - 128 (the most significant bit flipped), and each accumulator starts
// at 128 * sum_k w:
//     sum_k x * w = sum_k (x - 128) * w + 128 * sum_k w
// Exact because Linear proves |sum_k x * w| < 2^31. The start value and the partial sums may exceed i32, but additions
// wrap, the equation holds modulo 2^32 at every step, and the final sum fits in i32.
//
// Tile: 6 rows x 16 columns, two quads per step. 24 accumulators, 3 vectors of activations (quad 0 of rows 0 to 5, then
// quad 1 of them; the lane index selects one) and 2 of weights: 29 of 32 registers, 11 loads for 48 dot products.
//
// Attention: 4 rows x 16 columns, four quads per step. 16 accumulators, 4 vectors of rows and 4 of columns.
#pragma once

#include <arm_neon.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <utility>

#include "core/aligned.h"
#include "kernels/gemm.h"
#include "kernels/neon/kernels_neon.h"
#include "kernels/quads.h"

#define FQVIT_INLINE FQVIT_TARGET __attribute__((always_inline)) inline

namespace fqvit {
namespace {

constexpr int ROWS = 6, COLUMNS = 16, LANES = 4, QUADS = 2, STEP = 4 * QUADS;
static_assert(ROWS * COLUMNS <= MAX_TILE);

// One vector per four columns: accumulators of a row, or quads. Not an array, because compilers keep arrays in memory.
template <class Vector>
struct Columns {
    Vector first, second, third, fourth;
};

FQVIT_INLINE Columns<uint8x16_t> load(const std::uint8_t* p) {
    return {vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)};
}

// A compiler barrier: loads are not moved across it. Otherwise, compilers would load all columns of a step first, which
// needs more registers than there are.
FQVIT_INLINE void keep_order() { asm volatile("" ::: "memory"); }

// Add the products of quad q of row r and the weights to columns 0 to 7 (add_left) or 8 to 15 (add_right).
template <int r, int q>
FQVIT_INLINE void add_left(Columns<int32x4_t>& acc, const int8x16_t (&x)[3], int8x16_t w0, int8x16_t w1) {
    constexpr int place = ROWS * q + r;
    acc.first = dot_s8<place % LANES>(acc.first, w0, x[place / LANES]);
    acc.second = dot_s8<place % LANES>(acc.second, w1, x[place / LANES]);
}
template <int r, int q>
FQVIT_INLINE void add_right(Columns<int32x4_t>& acc, const int8x16_t (&x)[3], int8x16_t w0, int8x16_t w1) {
    constexpr int place = ROWS * q + r;
    acc.third = dot_s8<place % LANES>(acc.third, w0, x[place / LANES]);
    acc.fourth = dot_s8<place % LANES>(acc.fourth, w1, x[place / LANES]);
}

template <int q, int... r>
FQVIT_INLINE void add_quads(std::integer_sequence<int, r...>, Columns<int32x4_t> (&acc)[sizeof...(r)],
                            const int8x16_t (&x)[3], const std::int8_t* w) {
    const int8x16_t w0 = vld1q_s8(w), w1 = vld1q_s8(w + 16);
    (add_left<r, q>(acc[r], x, w0, w1), ...);
    keep_order();
    const int8x16_t w2 = vld1q_s8(w + 32), w3 = vld1q_s8(w + 48);
    (add_right<r, q>(acc[r], x, w2, w3), ...);
    keep_order();
}

FQVIT_INLINE void store(std::int32_t* to, const Columns<int32x4_t>& acc) {
    vst1q_s32(to, acc.first);
    vst1q_s32(to + 4, acc.second);
    vst1q_s32(to + 8, acc.third);
    vst1q_s32(to + 12, acc.fourth);
}

template <int... r>
FQVIT_INLINE void multiply_rows(std::integer_sequence<int, r...> every_row, const std::int8_t* w,
                                const std::int32_t* start, const std::uint8_t* block, std::int64_t steps,
                                std::int32_t* out) {
    const Columns<int32x4_t> from = {vld1q_s32(start), vld1q_s32(start + 4), vld1q_s32(start + 8),
                                     vld1q_s32(start + 12)};
    Columns<int32x4_t> acc[sizeof...(r)] = {((void)r, from)...};
    for (; steps > 0; --steps, w += STEP * COLUMNS, block += STEP * ROWS) {
        const auto* bytes = reinterpret_cast<const std::int8_t*>(block);
        const int8x16_t x[3] = {vld1q_s8(bytes), vld1q_s8(bytes + 16), vld1q_s8(bytes + 32)};
        add_quads<0>(every_row, acc, x, w);
        add_quads<1>(every_row, acc, x, w + 4 * COLUMNS);
    }
    (store(out + COLUMNS * r, acc[r]), ...);
}

template <int rows>
FQVIT_TARGET void multiply_tile(const std::int8_t* w, const std::int32_t* start, const std::uint8_t* block,
                                std::int64_t steps, std::int32_t* out) {
    multiply_rows(std::make_integer_sequence<int, rows>(), w, start, block, steps, out);
}

using MicroKernel = void (*)(const std::int8_t*, const std::int32_t*, const std::uint8_t*, std::int64_t, std::int32_t*);
constexpr MicroKernel BY_ROWS[ROWS + 1] = {nullptr,          multiply_tile<1>, multiply_tile<2>, multiply_tile<3>,
                                           multiply_tile<4>, multiply_tile<5>, multiply_tile<6>};

class PackedNeon final : public PackedWeights {
public:
    PackedNeon(const std::int8_t* w, std::int64_t outputs, std::int64_t inputs)
        : steps_((inputs + STEP - 1) / STEP),
          weights_(pack_groups<4>(w, outputs, inputs, COLUMNS, STEP)),
          start_(static_cast<std::size_t>(round_up(outputs, COLUMNS))) {
        for (std::int64_t o = 0; o < outputs; ++o) {
            const std::int64_t sum = std::accumulate(w + o * inputs, w + (o + 1) * inputs, std::int64_t{0});
            start_[static_cast<std::size_t>(o)] = static_cast<std::int32_t>(128 * sum);  // modulo 2^32
        }
    }

    void multiply(std::int64_t panel, const std::uint8_t* block, int rows, std::int32_t* acc) const override {
        BY_ROWS[rows](weights_.data() + panel * steps_ * STEP * COLUMNS, start_.data() + panel * COLUMNS, block, steps_,
                      acc);
    }

    std::size_t bytes() const override { return weights_.size() + start_.size() * sizeof(std::int32_t); }

private:
    std::int64_t steps_;
    AlignedVector<std::int8_t> weights_;
    AlignedVector<std::int32_t> start_;
};

class GemmNeon final : public Gemm {
public:
    constexpr explicit GemmNeon(const char* name) : Gemm(name, ROWS, COLUMNS) {}

    std::unique_ptr<PackedWeights> pack_weights(const std::int8_t* w, std::int64_t outputs,
                                                std::int64_t inputs) const override {
        return std::make_unique<PackedNeon>(w, outputs, inputs);
    }

    std::size_t block_bytes(std::int64_t inputs) const override {
        return static_cast<std::size_t>(round_up(inputs, STEP) * ROWS);
    }

    // Stores x - 128 of every row, quad by quad. Rows past `count` are not written: they are never multiplied. The
    // padding of K is multiplied by weights of 0.
    void pack_rows(const std::uint8_t* x, std::int64_t stride, int count, std::int64_t inputs,
                   std::uint8_t* block) const override {
        for (int r = 0; r < count; ++r) {
            const std::uint8_t* row = x + r * stride;
            std::uint8_t* out = block + 4 * r;
            std::int64_t k = 0;
            for (; k + 16 <= inputs; k += 16, out += 16 * ROWS) {
                const uint32x4_t quads = vreinterpretq_u32_u8(veorq_u8(vld1q_u8(row + k), vdupq_n_u8(0x80)));
                store_lane<0>(out, quads);
                store_lane<1>(out + 4 * ROWS, quads);
                store_lane<2>(out + 8 * ROWS, quads);
                store_lane<3>(out + 12 * ROWS, quads);
            }
            for (; k < round_up(inputs, STEP); k += 4, out += 4 * ROWS) {
                std::uint8_t quad[4] = {};
                if (k < inputs) {
                    std::memcpy(quad, row + k, static_cast<std::size_t>(std::min<std::int64_t>(4, inputs - k)));
                }
                for (int i = 0; i < 4; ++i) out[i] = static_cast<std::uint8_t>(quad[i] ^ 0x80);
            }
        }
    }

private:
    template <int lane>
    static void store_lane(std::uint8_t* out, uint32x4_t quads) {
        vst1q_lane_u32(reinterpret_cast<std::uint32_t*>(out), quads, lane);
    }
};

// A function, because vld1q_u8 may be a macro, in which compilers cannot expand parameter packs.
FQVIT_INLINE uint8x16_t load_chunk(const std::uint8_t* p) { return vld1q_u8(p); }

template <int q>
FQVIT_INLINE void add_quad(Columns<uint32x4_t>& acc, uint8x16_t a, const Columns<uint8x16_t>& b) {
    acc.first = dot_u8<q>(acc.first, b.first, a);
    acc.second = dot_u8<q>(acc.second, b.second, a);
    acc.third = dot_u8<q>(acc.third, b.third, a);
    acc.fourth = dot_u8<q>(acc.fourth, b.fourth, a);
}

FQVIT_INLINE void shift_left_8(Columns<uint32x4_t>& acc) {
    acc = {vshlq_n_u32(acc.first, 8), vshlq_n_u32(acc.second, 8), vshlq_n_u32(acc.third, 8),
           vshlq_n_u32(acc.fourth, 8)};
}

FQVIT_INLINE void store(std::uint32_t* to, const Columns<uint32x4_t>& acc) {
    vst1q_u32(to, acc.first);
    vst1q_u32(to + 4, acc.second);
    vst1q_u32(to + 8, acc.third);
    vst1q_u32(to + 12, acc.fourth);
}

template <int... r>
FQVIT_INLINE void attention_rows(std::integer_sequence<int, r...>, const std::uint8_t* a, const std::uint8_t* low,
                                 std::int64_t stride, const std::uint8_t* b, std::int64_t chunks, std::uint32_t* out) {
    const uint32x4_t zero = vdupq_n_u32(0);
    Columns<uint32x4_t> acc[sizeof...(r)] = {((void)r, Columns<uint32x4_t>{zero, zero, zero, zero})...};
    for (;;) {
        const std::uint8_t* panel = b;
        for (const std::uint8_t* end = a + 16 * chunks; a != end; a += 16, panel += 16 * ATTENTION_COLUMNS) {
            const uint8x16_t x[sizeof...(r)] = {load_chunk(a + r * stride)...};
            Columns<uint8x16_t> columns = load(panel);
            (add_quad<0>(acc[r], x[r], columns), ...);
            keep_order();
            columns = load(panel + 64);
            (add_quad<1>(acc[r], x[r], columns), ...);
            keep_order();
            columns = load(panel + 128);
            (add_quad<2>(acc[r], x[r], columns), ...);
            keep_order();
            columns = load(panel + 192);
            (add_quad<3>(acc[r], x[r], columns), ...);
        }
        if (low == nullptr) break;
        a = std::exchange(low, nullptr);
        (shift_left_8(acc[r]), ...);
    }
    (store(out + ATTENTION_COLUMNS * r, acc[r]), ...);
}

template <int rows>
FQVIT_TARGET void attention_tile(const std::uint8_t* a, const std::uint8_t* low, std::int64_t stride,
                                 const std::uint8_t* b, std::int64_t chunks, std::uint32_t* out) {
    attention_rows(std::make_integer_sequence<int, rows>(), a, low, stride, b, chunks, out);
}

constexpr AttentionTiles ATTENTION_TILES = {
    {nullptr, attention_tile<1>, attention_tile<2>, attention_tile<3>, attention_tile<4>}};

}  // namespace
}  // namespace fqvit
