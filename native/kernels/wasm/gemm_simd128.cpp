// acc[m, o] = sum_k x[m, k] * w[o, k] with SIMD128, using i32x4.dot_i16x8_s.
//
// Packing stores weights and activations as i16. Exact because a sum of two products of u8 and i8 is below 2^17, and
// Linear proves |sum_k x * w| < 2^31 for every partial sum.
//
// A block has 16 rows, four tiles of 4, so that a panel of weights is read from the L1 cache three times out of four.
#include "kernels/gemm.h"

#if defined(__wasm_simd128__)

#include <algorithm>

#include "core/aligned.h"
#include "core/memory_size.h"
#include "kernels/wasm/pairs_simd128.h"

namespace fqvit {
namespace {

using namespace simd128;

constexpr int ROWS = 4 * TILE_ROWS, COLUMNS = 2 * TILE_COLUMNS;
static_assert(ROWS * COLUMNS <= MAX_TILE);

std::int64_t pairs_of(std::int64_t inputs) { return (inputs + 1) / 2; }

class PackedSimd128 final : public PackedWeights {
public:
    // Panels of 8 outputs, [K / 2][8][2] each. K and O are padded with zeros.
    PackedSimd128(const std::int8_t* w, std::int64_t outputs, std::int64_t inputs)
        : panel_(pairs_of(inputs) * 2 * TILE_COLUMNS),
          pairs_(pairs_of(inputs)),
          weights_(memory_size(round_up(outputs, COLUMNS) / TILE_COLUMNS * panel_)) {
        for (std::int64_t o = 0; o < outputs; ++o) {
            std::int16_t* to = weights_.data() + o / TILE_COLUMNS * panel_ + o % TILE_COLUMNS * 2;
            for (std::int64_t k = 0; k < inputs; ++k) to[k / 2 * 2 * TILE_COLUMNS + k % 2] = w[o * inputs + k];
        }
    }

    void multiply(std::int64_t panel, const std::uint8_t* block, int rows, std::int32_t* acc) const override {
        const auto* a = reinterpret_cast<const std::int16_t*>(block);
        for (int half = 0; half < COLUMNS / TILE_COLUMNS; ++half) {
            const std::int16_t* b = weights_.data() + (panel * (COLUMNS / TILE_COLUMNS) + half) * panel_;
            for (int r = 0; r < rows; r += TILE_ROWS) {
                BY_ROWS<2, 2 * TILE_ROWS>[std::min(TILE_ROWS, rows - r)](
                    a + r * 2 * pairs_, b, pairs_, acc + r * COLUMNS + half * TILE_COLUMNS, COLUMNS);
            }
        }
    }

    std::size_t bytes() const override { return weights_.size() * sizeof(std::int16_t); }

private:
    std::int64_t panel_, pairs_;
    AlignedVector<std::int16_t> weights_;
};

class GemmSimd128 final : public Gemm {
public:
    constexpr GemmSimd128() : Gemm("simd128", ROWS, COLUMNS) {}

    std::unique_ptr<PackedWeights> pack_weights(const std::int8_t* w, std::int64_t outputs,
                                                std::int64_t inputs) const override {
        return std::make_unique<PackedSimd128>(w, outputs, inputs);
    }

    std::size_t block_bytes(std::int64_t inputs) const override {
        return memory_size(pairs_of(inputs) * 2 * ROWS * std::int64_t{sizeof(std::int16_t)});
    }

    // Tiles of 4 rows, [K / 2][4][2] each. Rows past `count` are not written: they are never multiplied.
    void pack_rows(const std::uint8_t* x, std::int64_t stride, int count, std::int64_t inputs,
                   std::uint8_t* block) const override {
        constexpr int PAIR = 2 * TILE_ROWS;  // elements from one pair of a row to the next
        for (int r = 0; r < count; ++r) {
            const std::uint8_t* row = x + r * stride;
            auto* out = reinterpret_cast<std::int16_t*>(block) + r / TILE_ROWS * TILE_ROWS * 2 * pairs_of(inputs) +
                        r % TILE_ROWS * 2;
            std::int64_t k = 0;
            for (; k + 8 <= inputs; k += 8, out += 4 * PAIR) {
                const v128_t words = wasm_u16x8_load8x8(row + k);
                wasm_v128_store32_lane(out, words, 0);
                wasm_v128_store32_lane(out + PAIR, words, 1);
                wasm_v128_store32_lane(out + 2 * PAIR, words, 2);
                wasm_v128_store32_lane(out + 3 * PAIR, words, 3);
            }
            for (; k < inputs; k += 2, out += PAIR) {
                out[0] = row[k];
                out[1] = k + 1 < inputs ? row[k + 1] : std::int16_t{0};
            }
        }
    }
};

}  // namespace

const Gemm* gemm_simd128() {
    static constexpr GemmSimd128 gemm;
    return &gemm;
}

}  // namespace fqvit

#else

namespace fqvit {
const Gemm* gemm_simd128() { return nullptr; }
}  // namespace fqvit

#endif
