// Owns the per-channel constants of a Requantization (kernels/kernels.h), and computes the constants of
// a per-tensor requantization.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/aligned.h"
#include "core/value.h"
#include "kernels/kernels.h"

namespace fqvit {

// Returns v[order[i]] for every i.
template <class Vector>
Vector reordered(const Vector& v, const std::vector<std::int32_t>& order) {
    Vector made(v);
    for (std::size_t i = 0; i < order.size(); ++i) made[i] = v[static_cast<std::size_t>(order[i])];
    return made;
}

class RequantizationConstants {
public:
    RequantizationConstants() = default;
    // bias: one value per channel, folded into vector_half; null if there is no bias. bound: upper bound of |acc|, of
    // |acc + bias| and of |bias|; with the default, accumulators are not lifted.
    RequantizationConstants(std::vector<std::uint32_t> mult, std::vector<std::uint8_t> shift,
                            std::vector<std::int32_t> zero, std::int64_t last, const std::int32_t* bias,
                            std::int64_t bound = std::int64_t{1} << 31);
    // The constants of channels in another order: new channel i is old channel order[i].
    RequantizationConstants reordered(const std::vector<std::int32_t>& order, const std::int32_t* new_bias) const;
    Requantization view() const;
    std::size_t bytes() const;

private:
    std::vector<std::uint32_t> mult_;
    std::vector<std::uint8_t> shift_;
    std::vector<std::int32_t> zero_;
    std::int64_t last_ = 0, bound_ = 0;
    int lift_ = 0;
    Requantization::Form form_ = Requantization::ANY;
    AlignedVector<std::int32_t> vector_mult_, vector_shift_;
    AlignedVector<std::int64_t> vector_half_;
};

// Checks mult, shift and zero. y: describes the output codes; bound: upper bound of |acc|, below 2^31.
TensorRequantization tensor_requantization(std::int64_t mult, std::int64_t shift, std::int64_t zero, const Value& y,
                                           std::int64_t bound);

}  // namespace fqvit
