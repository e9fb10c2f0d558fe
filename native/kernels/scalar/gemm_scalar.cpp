// The portable family, and the readable one: a plain dot product for each output.
#include <cstring>
#include <vector>

#include "kernels/gemm.h"

namespace fqvit {
namespace {

constexpr int ROWS = 4, COLUMNS = 4;

class PackedScalar final : public Packed {
public:
    PackedScalar(const std::int8_t* w, std::int64_t outputs, std::int64_t inputs)
        : outputs_(outputs),
          inputs_(inputs),
          w_(w, w + outputs * inputs) {}

    void multiply(std::int64_t panel, const std::uint8_t* block, int rows, std::int32_t* acc) const override {
        for (int r = 0; r < rows; ++r) {
            for (int c = 0; c < COLUMNS; ++c) {
                const std::int64_t output = panel * COLUMNS + c;
                std::int32_t sum = 0;  // |sum| < 2^31 is proved for the whole and for every part of it
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

class Scalar final : public Gemm {
public:
    constexpr Scalar() : Gemm("scalar", ROWS, COLUMNS) {}

    std::unique_ptr<Packed> pack(const std::int8_t* w, std::int64_t outputs, std::int64_t inputs) const override {
        return std::make_unique<PackedScalar>(w, outputs, inputs);
    }
    std::size_t block_bytes(std::int64_t inputs) const override { return static_cast<std::size_t>(ROWS * inputs); }
    void pack_rows(const std::uint8_t* x, std::int64_t stride, int count, std::int64_t inputs,
                   std::uint8_t* block) const override {
        for (int r = 0; r < count; ++r)
            std::memcpy(block + r * inputs, x + r * stride, static_cast<std::size_t>(inputs));
    }
};

}  // namespace

const Gemm* gemm_scalar() {
    static constexpr Scalar family;
    return &family;
}

}  // namespace fqvit
