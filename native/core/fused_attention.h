// All heads of one attention layer as one op: Q, K, V -> context. It replaces the scores, softmax, weights times V, the
// permutes that split the heads of Q, K and V, and the permute that joins the heads. Each operand may lie in a buffer
// of its own, with or without such a permute.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "core/head_layout.h"
#include "kernels/attention_bytes.h"
#include "ops/ops.h"

namespace fqvit {

// The positions of Q, K and V in the inputs of the op, and of the context in its output.
struct AttentionLayout {
    HeadLayout q, k, v, y;
};

class FusedAttention final : public Op {
public:
    // times_v: a WeightedSum or a MatMul. All operands have u8 codes. The caller sets inputs (Q, K, V), output and
    // value. Returns null if the kernels do not support these parameters.
    static std::unique_ptr<FusedAttention> make(const MatMul& scores, const Softmax& softmax, const Op& times_v,
                                                const AttentionLayout& layout, const Kernels& kernels);

    std::int64_t items() const override { return heads_ * blocks_ * windows_; }
    std::int64_t macs() const override { return macs_; }
    std::size_t bytes() const override {
        return (table_.size() + bias_.size() + index_.size() + score_mults_.size() + mults_.size()) * 4 +
               region_.size();
    }
    std::size_t scratch() const override { return kernels_->attention_scratch(head()) + bias_bytes(); }
    void run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t* scratch) const override;

private:
    // Returns attention_ with its pointers filled in.
    Attention head() const;
    bool set_output(const Op& times_v, const Softmax& softmax);
    bool set_weights(const std::vector<std::int32_t>& weight);
    // expanded[m - first, t] = bias[head, index[m, t]] for `count` queries m from `first` on.
    void expand_bias(std::int64_t head, std::int64_t first, std::int64_t count, std::int32_t* expanded) const;
    // Kernels read the bias in rows that are padded to a multiple of 16 entries.
    std::int64_t bias_stride() const { return round_up(attention_.tokens, std::int64_t{16}); }
    std::size_t bias_bytes() const {
        return bias_.empty() ? 0 : static_cast<std::size_t>(attention_.queries * bias_stride()) * 4;
    }

    Attention attention_{};  // parameters of one block of queries; head() fills in the pointers
    AttentionLayout layout_{};
    std::int64_t windows_ = 1, heads_ = 1, macs_ = 0;
    std::int64_t queries_ = 1, blocks_ = 1;  // per head and window
    std::vector<std::int32_t> table_;
    std::vector<std::int32_t> score_mults_, mults_;  // [H], or empty: all heads have the multiplier of attention_
    std::vector<std::int32_t> bias_;                 // [H, R]
    std::int64_t bias_rows_ = 0;                     // R
    std::vector<std::int32_t> index_;                // [M, T]
    std::vector<std::uint8_t> region_;
    std::vector<std::int16_t> weight_;
    AttentionBytes bytes_;
    std::uint8_t code_by_distance_[256] = {}, weight_low_[16] = {}, weight_high_[16] = {};
    const Kernels* kernels_ = nullptr;
};

}  // namespace fqvit
