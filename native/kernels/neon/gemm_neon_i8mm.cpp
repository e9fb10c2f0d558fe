// acc[m, o] = sum_k x[m, k] * w[o, k] on AArch64 with usmmla, which multiplies a 2 x 8 matrix of u8 by the transpose of
// a 2 x 8 matrix of i8 and adds the 2 x 2 result to four i32 lanes.
//
// Exact because Linear proves |sum_k x * w| < 2^31 for the whole sum and for every partial sum.
//
// Tile: 6 rows x 16 columns, 8 k per step. 24 accumulators of 2 x 2, 3 vectors of activations (2 rows each), and
// vectors of weights (2 columns each) that are loaded as they are needed: 11 loads for 24 usmmla.
#include "kernels/gemm.h"

// gemm_neon_dotprod.cpp explains the condition on Clang's version.
#if defined(__aarch64__) && defined(__GNUC__) && \
    (!defined(__clang__) || __clang_major__ >= 16 || defined(__ARM_FEATURE_MATMUL_INT8))

#include <arm_neon.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/aligned.h"
#include "kernels/quads.h"

#if defined(__ARM_FEATURE_MATMUL_INT8)
#define FQVIT_TARGET
#else
#define FQVIT_TARGET __attribute__((target("arch=armv8.2-a+i8mm")))
#endif
#define FQVIT_INLINE FQVIT_TARGET __attribute__((always_inline)) inline

namespace fqvit {
namespace {

constexpr int ROWS = 6, COLUMNS = 16, STEP = 8;
static_assert(ROWS * COLUMNS <= MAX_TILE);

// Accumulators of two columns: row pairs 0, 1 and 2. Not an array, because compilers keep arrays in memory.
struct ColumnPair {
    int32x4_t first, second, third;
};

template <int row_pairs>
FQVIT_INLINE void add(ColumnPair& acc, const uint8x16_t (&x)[3], const std::int8_t* w) {
    const int8x16_t columns = vld1q_s8(w);
    acc.first = vusmmlaq_s32(acc.first, x[0], columns);
    if constexpr (row_pairs > 1) acc.second = vusmmlaq_s32(acc.second, x[1], columns);
    if constexpr (row_pairs > 2) acc.third = vusmmlaq_s32(acc.third, x[2], columns);
    asm volatile("" ::: "memory");  // otherwise compilers load all columns first, which needs too many registers
}

// Stores four columns of two rows. The lanes of an accumulator are row 0 of both columns, then row 1.
FQVIT_INLINE void store(std::int32_t* to, int32x4_t left, int32x4_t right, bool both) {
    const int64x2_t a = vreinterpretq_s64_s32(left), b = vreinterpretq_s64_s32(right);
    vst1q_s32(to, vreinterpretq_s32_s64(vzip1q_s64(a, b)));
    if (both) vst1q_s32(to + COLUMNS, vreinterpretq_s32_s64(vzip2q_s64(a, b)));
}

template <int rows>
FQVIT_INLINE void store(std::int32_t* to, const ColumnPair& left, const ColumnPair& right) {
    store(to, left.first, right.first, rows > 1);
    if constexpr (rows > 2) store(to + 2 * COLUMNS, left.second, right.second, rows > 3);
    if constexpr (rows > 4) store(to + 4 * COLUMNS, left.third, right.third, rows > 5);
}

// block: [K / 8][ROWS][8]   w: [K / 8][COLUMNS][8]
template <int rows, int... c>
FQVIT_INLINE void multiply_columns(std::integer_sequence<int, c...>, const std::int8_t* w, const std::uint8_t* block,
                                   std::int64_t steps, std::int32_t* out) {
    constexpr int row_pairs = (rows + 1) / 2;
    const int32x4_t zero = vdupq_n_s32(0);
    ColumnPair acc[sizeof...(c)] = {((void)c, ColumnPair{zero, zero, zero})...};
    for (; steps > 0; --steps, w += STEP * COLUMNS, block += STEP * ROWS) {
        const uint8x16_t x[3] = {vld1q_u8(block), row_pairs > 1 ? vld1q_u8(block + 16) : uint8x16_t{},
                                 row_pairs > 2 ? vld1q_u8(block + 32) : uint8x16_t{}};
        (add<row_pairs>(acc[c], x, w + 16 * c), ...);
    }
    ((c % 2 == 0 ? store<rows>(out + 2 * c, acc[c], acc[c | 1]) : void()), ...);
}

template <int rows>
FQVIT_TARGET void multiply_tile(const std::int8_t* w, const std::uint8_t* block, std::int64_t steps,
                                std::int32_t* out) {
    multiply_columns<rows>(std::make_integer_sequence<int, COLUMNS / 2>(), w, block, steps, out);
}

using MicroKernel = void (*)(const std::int8_t*, const std::uint8_t*, std::int64_t, std::int32_t*);
constexpr MicroKernel BY_ROWS[ROWS + 1] = {nullptr,          multiply_tile<1>, multiply_tile<2>, multiply_tile<3>,
                                           multiply_tile<4>, multiply_tile<5>, multiply_tile<6>};

class PackedNeonI8mm final : public PackedWeights {
public:
    PackedNeonI8mm(const std::int8_t* w, std::int64_t outputs, std::int64_t inputs)
        : steps_((inputs + STEP - 1) / STEP), weights_(pack_groups<STEP>(w, outputs, inputs, COLUMNS, STEP)) {}

    void multiply(std::int64_t panel, const std::uint8_t* block, int rows, std::int32_t* acc) const override {
        BY_ROWS[rows](weights_.data() + panel * steps_ * STEP * COLUMNS, block, steps_, acc);
    }

    std::size_t bytes() const override { return weights_.size(); }

private:
    std::int64_t steps_;
    AlignedVector<std::int8_t> weights_;
};

class GemmNeonI8mm final : public Gemm {
public:
    constexpr GemmNeonI8mm() : Gemm("neon_i8mm", ROWS, COLUMNS) {}

    std::unique_ptr<PackedWeights> pack_weights(const std::int8_t* w, std::int64_t outputs,
                                                std::int64_t inputs) const override {
        return std::make_unique<PackedNeonI8mm>(w, outputs, inputs);
    }

    std::size_t block_bytes(std::int64_t inputs) const override {
        return static_cast<std::size_t>(round_up(inputs, STEP) * ROWS);
    }

    // Packs groups of 8 bytes of every row. If the number of rows is odd, the row after the last is multiplied, too,
    // but its products are not stored. The padding of K is multiplied by weights of 0.
    void pack_rows(const std::uint8_t* x, std::int64_t stride, int count, std::int64_t inputs,
                   std::uint8_t* block) const override {
        for (int r = 0; r < count; ++r) {
            const std::uint8_t* row = x + r * stride;
            std::uint8_t* out = block + STEP * r;
            std::int64_t k = 0;
            for (; k + 16 <= inputs; k += 16, out += 2 * STEP * ROWS) {
                const uint8x16_t both = vld1q_u8(row + k);
                vst1_u8(out, vget_low_u8(both));
                vst1_u8(out + STEP * ROWS, vget_high_u8(both));
            }
            for (; k < inputs; k += STEP, out += STEP * ROWS) {
                std::memset(out, 0, STEP);
                std::memcpy(out, row + k, static_cast<std::size_t>(std::min<std::int64_t>(STEP, inputs - k)));
            }
        }
    }
};

}  // namespace

const Gemm* gemm_neon_i8mm() {
    static constexpr GemmNeonI8mm gemm;
    return &gemm;
}

}  // namespace fqvit

#else

namespace fqvit {
const Gemm* gemm_neon_i8mm() { return nullptr; }
}  // namespace fqvit

#endif
