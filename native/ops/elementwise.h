// The ops multiply, rotary, depthwise and max. Fusion (core/fuse.cpp) inspects Depthwise; the others are accessible
// only through make functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/aligned.h"
#include "kernels/kernels.h"
#include "ops/op.h"
#include "ops/ops.h"
#include "ops/requantization.h"

namespace fqvit {

// acc[i, c] = bias[c] + sum over k of x[index[i, k], c] * w[k, c], which is then requantized to codes. After fusion,
// the codes are looked up in a table.
class Depthwise final : public Op {
public:
    Depthwise(const DepthwiseFields& fields, Scope& scope);
    std::int64_t items() const override { return value.rows(); }
    void run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t* scratch) const override;
    std::size_t scratch() const override;
    std::int64_t macs() const override { return value.count() * taps_; }
    std::size_t bytes() const override;

    // Fuses a lookup into this op, if possible, and returns whether it did.
    bool fuse_lookup(const Lookup& lookup);

private:
    const Kernels* kernels_;
    std::int64_t channels_, taps_;
    bool wide_in_;
    std::vector<std::int32_t> index_;    // [i, K]
    std::vector<std::uint8_t> fill_;     // the bytes of one row
    AlignedVector<std::int32_t> pairs_;  // Taps::weights
    std::vector<std::int32_t> bias_;
    RequantizationConstants requantization_;
    Epilogue epilogue_{};
    FusedTables tables_;
};

std::unique_ptr<Op> make_multiply(const MultiplyFields& fields, Scope& scope);
std::unique_ptr<Op> make_rotary(const RotaryFields& fields, Scope& scope);
std::unique_ptr<Op> make_max(const MaxFields& fields, Scope& scope);

}  // namespace fqvit
