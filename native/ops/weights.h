// The weights of linear ops, packed for the kernels. Ops that use the same constant share one packed copy: one layer
// that runs on several feature maps, or the same layers in programs for different image sizes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernels/gemm.h"

namespace fqvit {

struct LinearWeights {
    std::int64_t outputs = 0, inputs = 0;
    const Gemm* gemm = nullptr;
    std::unique_ptr<PackedWeights> packed;  // for u8 activations
    std::vector<std::int8_t> plain;         // instead of packed, for u16 activations
    // Per output: the sum of its positive and of its negative weights, which bound the accumulator.
    std::vector<std::int64_t> positive, negative;

    std::size_t bytes() const {
        return (packed ? packed->bytes() : plain.size()) + (positive.size() + negative.size()) * sizeof(std::int64_t);
    }
};

// Sums of the positive and of the negative weights of one output.
struct WeightSums {
    std::int64_t positive, negative;
};
WeightSums sum_weights(const std::int8_t* w, std::int64_t inputs);

class WeightStore {
public:
    using Key = std::pair<std::string, bool>;  // the name of the constant, and whether activations are u16
    std::shared_ptr<const LinearWeights> find(const Key& key) const {
        const auto found = weights_.find(key);
        return found == weights_.end() ? nullptr : found->second;
    }
    void add(const Key& key, std::shared_ptr<const LinearWeights> weights) {
        bytes_ += weights->bytes();
        weights_.emplace(key, std::move(weights));
    }
    std::size_t bytes() const { return bytes_; }

private:
    std::map<Key, std::shared_ptr<const LinearWeights>> weights_;
    std::size_t bytes_ = 0;
};

}  // namespace fqvit
