// All heads of one attention layer as one op: qkv [W, T, 3 H D] -> context [W, T, H D]. It replaces seven ops: three
// permutes (Q, K, V), the scores, softmax, weights times V, and the permute that joins the heads.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "ops/ops.h"

namespace fqvit {

class FusedAttention final : public Op {
public:
    // times_v: a WeightedSum or a MatMul. heads_shape: of Q, K and V, [W, H, T, D] or [H, T, D]. The caller checked
    // that all shapes match. Returns null if the kernels do not support these parameters.
    static std::unique_ptr<FusedAttention> make(const MatMul& scores, const Softmax& softmax, const Op& times_v,
                                                const Shape& heads_shape, const Kernels& kernels);

    std::int64_t items() const override { return heads_ * windows_; }
    std::int64_t macs() const override { return macs_; }
    std::size_t bytes() const override {
        return (table_.size() + bias_.size()) * 4 + index_.size() * 2 + region_.size();
    }
    std::size_t scratch() const override { return kernels_->attention_scratch(attention_) + bias_bytes(); }
    void run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t* scratch) const override;

private:
    bool set_output(const Op& times_v, const Softmax& softmax);
    bool set_weights(const std::vector<std::int32_t>& weight);
    void expand_bias(std::int64_t head, std::int32_t* expanded) const;
    // Kernels read the bias in rows that are padded to a multiple of 16 entries.
    std::int64_t bias_stride() const { return round_up(attention_.tokens, std::int64_t{16}); }
    std::size_t bias_bytes() const {
        return bias_.empty() ? 0 : static_cast<std::size_t>(attention_.tokens * bias_stride()) * 4;
    }

    Attention attention_{};  // pointers are filled in by run()
    std::int64_t windows_ = 1, heads_ = 1, macs_ = 0;
    std::vector<std::int32_t> table_;
    std::vector<std::int32_t> bias_;  // [H, R]
    std::int64_t bias_rows_ = 0;      // R
    std::vector<std::uint16_t> index_;
    std::vector<std::uint8_t> region_;
    std::vector<std::int16_t> weight_;
    std::uint8_t code_by_distance_[256] = {}, weight_low_[16] = {}, weight_high_[16] = {};
    const Kernels* kernels_ = nullptr;
};

}  // namespace fqvit
