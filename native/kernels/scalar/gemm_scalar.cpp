// acc[m, o] = sum_k x[m, k] * w[o, k], one plain dot product per output: the portable and readable version.
//
// Exact because Linear proves |acc| < 2^31 for the whole sum and for every partial sum, in any order (ops/linear.cpp).
// Tile: 4 rows x 4 columns. Packing only copies.
#include <cstring>
#include <vector>

#include "kernels/gemm.h"

namespace fqvit {
namespace {

constexpr int ROWS = 4, COLUMNS = 4;

class PackedScalar final : public PackedWeights {
public:
    PackedScalar(const std::int8_t* w, std::int64_t outputs, std::int64_t inputs)
        : outputs_(outputs), inputs_(inputs), w_(w, w + outputs * inputs) {}

    void multiply(std::int64_t panel, const std::uint8_t* block, int rows, std::int32_t* acc) const override {
        for (int r = 0; r < rows; ++r) {
            for (int c = 0; c < COLUMNS; ++c) {
                const std::int64_t output = panel * COLUMNS + c;
                std::int32_t sum = 0;
                if (output < outputs_) {
                    const std::int8_t* w = w_.data() + output * inputs_;
                    const std::uint8_t* x = block + r * inputs_;
                    for (std::int64_t k = 0; k < inputs_; ++k) sum += std::int32_t{x[k]} * w[k];
                }
                acc[r * COLUMNS + c] = sum;
            }
        }
    }

    std::size_t bytes() const override { return w_.size(); }

private:
    std::int64_t outputs_, inputs_;
    std::vector<std::int8_t> w_;
};

class GemmScalar final : public Gemm {
public:
    constexpr GemmScalar() : Gemm("scalar", ROWS, COLUMNS) {}

    std::unique_ptr<PackedWeights> pack_weights(const std::int8_t* w, std::int64_t outputs,
                                                std::int64_t inputs) const override {
        return std::make_unique<PackedScalar>(w, outputs, inputs);
    }
    std::size_t block_bytes(std::int64_t inputs) const override { return static_cast<std::size_t>(ROWS * inputs); }
    void pack_rows(const std::uint8_t* x, std::int64_t stride, int count, std::int64_t inputs,
                   std::uint8_t* block) const override {
        for (int r = 0; r < count; ++r) {
            std::memcpy(block + r * inputs, x + r * stride, static_cast<std::size_t>(inputs));
        }
    }
};

}  // namespace

const Gemm* gemm_scalar() {
    static constexpr GemmScalar gemm;
    return &gemm;
}

}  // namespace fqvit
