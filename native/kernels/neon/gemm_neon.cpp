// acc[m, o] = sum_k x[m, k] w[o, k] on AArch64, by sdot, which adds four i8 x i8 products to each i32 lane.
//
// Activations are u8, so packing stores x - 128 (the highest bit flipped), and each accumulator starts at 128 sum_k w:
//     sum_k x w = sum_k (x - 128) w + 128 sum_k w
// Exact because Linear proves |sum_k x w| < 2^31. The start value and the partial sums may exceed i32, but sdot
// wraps, the equation holds modulo 2^32 at every step, and the final sum fits in i32.
//
// Tile: 8 rows x 12 columns. 24 accumulators, 3 vectors of weights, 2 of activations (four bytes per row, selected by
// the lane index of sdot): 29 of 32 registers, 5 loads for 24 sdot.
#include "kernels/gemm.h"

// Before version 16, Clang offers these intrinsics only if -march enables them, not through the target attribute.
#if defined(__aarch64__) && defined(__GNUC__) && \
    (!defined(__clang__) || __clang_major__ >= 16 || defined(__ARM_FEATURE_DOTPROD))

#include <arm_neon.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <utility>

#include "core/aligned.h"
#include "kernels/quads.h"

#if defined(__ARM_FEATURE_DOTPROD)
#define FQVIT_TARGET
#else
#define FQVIT_TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
#endif
#define FQVIT_INLINE FQVIT_TARGET __attribute__((always_inline)) inline

namespace fqvit {
namespace {

constexpr int ROWS = 8, COLUMNS = 12, LANES = 4;
static_assert(ROWS * COLUMNS <= MAX_TILE);

// The accumulators of one row of a tile.
struct RowAcc {
    int32x4_t first, second, third;
};

template <int r>
FQVIT_INLINE void add_row(RowAcc& acc, const int8x16_t (&x)[2], int8x16_t w0, int8x16_t w1, int8x16_t w2) {
    acc.first = vdotq_laneq_s32(acc.first, w0, x[r / LANES], r % LANES);
    acc.second = vdotq_laneq_s32(acc.second, w1, x[r / LANES], r % LANES);
    acc.third = vdotq_laneq_s32(acc.third, w2, x[r / LANES], r % LANES);
}

FQVIT_INLINE void store(std::int32_t* to, const RowAcc& acc) {
    vst1q_s32(to, acc.first);
    vst1q_s32(to + LANES, acc.second);
    vst1q_s32(to + 2 * LANES, acc.third);
}

template <int... r>
FQVIT_INLINE void multiply_rows(std::integer_sequence<int, r...>, const std::int8_t* w, const std::int32_t* start,
                                const std::uint8_t* block, std::int64_t quads, std::int32_t* out) {
    const RowAcc from = {vld1q_s32(start), vld1q_s32(start + LANES), vld1q_s32(start + 2 * LANES)};
    RowAcc acc[sizeof...(r)] = {((void)r, from)...};
    for (; quads > 0; --quads, w += 4 * COLUMNS, block += 4 * ROWS) {
        const int8x16_t x[2] = {vreinterpretq_s8_u8(vld1q_u8(block)),
                                sizeof...(r) > LANES ? vreinterpretq_s8_u8(vld1q_u8(block + 4 * LANES)) : int8x16_t{}};
        const int8x16_t w0 = vld1q_s8(w), w1 = vld1q_s8(w + 16), w2 = vld1q_s8(w + 32);
        (add_row<r>(acc[r], x, w0, w1, w2), ...);
    }
    (store(out + COLUMNS * r, acc[r]), ...);
}

template <int rows>
FQVIT_TARGET void multiply_tile(const std::int8_t* w, const std::int32_t* start, const std::uint8_t* block,
                                std::int64_t quads, std::int32_t* out) {
    multiply_rows(std::make_integer_sequence<int, rows>(), w, start, block, quads, out);
}

using MicroKernel = void (*)(const std::int8_t*, const std::int32_t*, const std::uint8_t*, std::int64_t, std::int32_t*);

template <int... r>
constexpr std::array<MicroKernel, ROWS> by_rows(std::integer_sequence<int, r...>) {
    return {multiply_tile<r + 1>...};
}

constexpr std::array<MicroKernel, ROWS> BY_ROWS = by_rows(std::make_integer_sequence<int, ROWS>());

class PackedNeon final : public PackedWeights {
public:
    PackedNeon(const std::int8_t* w, std::int64_t outputs, std::int64_t inputs)
        : quads_((inputs + 3) / 4),
          panel_(quads_ * 4 * COLUMNS),
          weights_(pack_quads(w, outputs, inputs, COLUMNS)),
          start_(static_cast<std::size_t>((outputs + COLUMNS - 1) / COLUMNS * COLUMNS)) {
        for (std::int64_t o = 0; o < outputs; ++o) {
            const std::int64_t sum = std::accumulate(w + o * inputs, w + (o + 1) * inputs, std::int64_t{0});
            start_[static_cast<std::size_t>(o)] = static_cast<std::int32_t>(128 * sum);  // modulo 2^32
        }
    }

    void multiply(std::int64_t panel, const std::uint8_t* block, int rows, std::int32_t* acc) const override {
        BY_ROWS[static_cast<std::size_t>(rows - 1)](weights_.data() + panel * panel_, start_.data() + panel * COLUMNS,
                                                    block, quads_, acc);
    }

    std::size_t bytes() const override { return weights_.size() + start_.size() * sizeof(std::int32_t); }

private:
    std::int64_t quads_, panel_;  // panel_: bytes per panel
    AlignedVector<std::int8_t> weights_;
    AlignedVector<std::int32_t> start_;
};

class GemmNeonDotprod final : public Gemm {
public:
    constexpr GemmNeonDotprod() : Gemm("neon_dotprod", ROWS, COLUMNS) {}

    std::unique_ptr<PackedWeights> pack_weights(const std::int8_t* w, std::int64_t outputs,
                                                std::int64_t inputs) const override {
        return std::make_unique<PackedNeon>(w, outputs, inputs);
    }

    std::size_t block_bytes(std::int64_t inputs) const override {
        return static_cast<std::size_t>((inputs + 3) / 4 * 4 * ROWS);
    }

    // Stores x - 128 of every row, quad by quad. Rows past `count` are not written: they are never multiplied.
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
            for (; k < inputs; k += 4, out += 4 * ROWS) {
                std::uint8_t quad[4] = {};  // the padding of the last quad is multiplied by weights of 0
                std::memcpy(quad, row + k, static_cast<std::size_t>(std::min<std::int64_t>(4, inputs - k)));
                for (int i = 0; i < 4; ++i) out[i] = static_cast<std::uint8_t>(quad[i] ^ 0x80);
            }
        }
    }

private:
    template <int lane>
    static void store_lane(std::uint8_t* out, uint32x4_t quads) {
        const std::uint32_t quad = vgetq_lane_u32(quads, lane);
        std::memcpy(out, &quad, 4);
    }
};

}  // namespace

const Gemm* gemm_neon_dotprod() {
    static constexpr GemmNeonDotprod gemm;
    return &gemm;
}

}  // namespace fqvit

#else

namespace fqvit {
const Gemm* gemm_neon_dotprod() { return nullptr; }
}  // namespace fqvit

#endif
