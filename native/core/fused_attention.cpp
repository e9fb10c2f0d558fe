#include "core/fused_attention.h"

#include <algorithm>

namespace fqvit {

// Sets the requantization of the output and the weight of each code. Returns false if a weight does not fit in i16.
bool FusedAttention::set_output(const Op& times_v, const Softmax& softmax) {
    Attention& a = attention_;
    if (const auto* sum = dynamic_cast<const WeightedSum*>(&times_v)) {
        a.largest_weight = sum->largest_weight;
        a.mult = sum->mult, a.shift = static_cast<int>(sum->shift);
        a.v_zero = static_cast<std::int32_t>(sum->v_zero);
        a.y_zero = static_cast<std::int32_t>(sum->y_zero), a.y_last = static_cast<std::int32_t>(sum->last);
        return set_weights(sum->weight);
    }
    const auto& product = dynamic_cast<const MatMul&>(times_v);
    a.mult = product.mult, a.shift = static_cast<int>(product.shift);
    a.v_zero = static_cast<std::int32_t>(product.b_zero);
    a.y_zero = static_cast<std::int32_t>(product.y_zero), a.y_last = static_cast<std::int32_t>(product.last);
    std::vector<std::int32_t> weight;
    for (std::int64_t code = 0; code <= softmax.last; ++code) {
        weight.push_back(static_cast<std::int32_t>(code - product.a_zero));
    }
    return set_weights(weight);
}

// Stores the weights as i16, negated if one of them is 2^15. Returns false if they do not fit in i16.
bool FusedAttention::set_weights(const std::vector<std::int32_t>& weight) {
    const auto [least, most] = std::minmax_element(weight.begin(), weight.end());
    if (*most > 32768 || *least < -32767) return false;
    attention_.sign = *most == 32768 ? -1 : 1;
    for (const std::int32_t w : weight) weight_.push_back(static_cast<std::int16_t>(attention_.sign * w));
    return true;
}

std::unique_ptr<FusedAttention> FusedAttention::make(const MatMul& scores, const Softmax& softmax, const Op& times_v,
                                                     const Shape& heads_shape, const Kernels& kernels) {
    if (kernels.attention == nullptr) return nullptr;
    auto fused = std::make_unique<FusedAttention>();
    const std::size_t lead = heads_shape.size() - 3;
    const std::int64_t heads = heads_shape[lead], tokens = heads_shape[lead + 1], width = heads_shape[lead + 2];
    fused->windows_ = lead == 1 ? heads_shape[0] : 1, fused->heads_ = heads;
    Attention& a = fused->attention_;
    a.tokens = tokens, a.width = width;
    a.q_stride = a.k_stride = a.v_stride = 3 * heads * width, a.y_stride = heads * width;
    a.q_zero = static_cast<std::int32_t>(scores.a_zero), a.k_zero = static_cast<std::int32_t>(scores.b_zero);
    a.score_zero = static_cast<std::int32_t>(scores.y_zero), a.score_last = static_cast<std::int32_t>(scores.last);
    a.score_mult = scores.mult, a.score_shift = static_cast<int>(scores.shift);
    a.kind = softmax.kind;
    fused->table_ = softmax.table;
    a.table_length = static_cast<std::int64_t>(fused->table_.size());
    a.table_decreases = std::is_sorted(fused->table_.rbegin(), fused->table_.rend());
    // Kernels also multiply table entries of distances that do not occur in the row. If the table never increases,
    // these entries are at most the sum of the row, so the proof of the softmax covers them.
    if (a.kind == Attention::UNIFORM && !a.table_decreases) return nullptr;
    a.softmax_mult = softmax.mult, a.softmax_shift = static_cast<int>(softmax.shift);
    a.softmax_last = static_cast<std::int32_t>(softmax.last);
    if (!fused->set_output(times_v, softmax)) return nullptr;
    // Kernels need codes minus their zero point to fit in 9 bits.
    if (std::max({a.q_zero, a.k_zero, a.v_zero}) > 255) return nullptr;
    // Kernels divide a row by the sum of its weights if and only if its codes are from row_codes.
    if ((a.kind == Attention::RELATIVE) != (a.largest_weight > 0)) return nullptr;
    a.masked_code = static_cast<std::int32_t>(a.kind == Attention::LOG       ? softmax.last
                                              : a.kind == Attention::UNIFORM ? 0
                                                                             : fused->table_.back());
    if (a.kind == Attention::RELATIVE) {
        a.sixteen_codes = true;
        for (std::size_t d = 0; d < std::min<std::size_t>(fused->table_.size(), 256); ++d) {
            fused->code_by_distance_[d] = static_cast<std::uint8_t>(fused->table_[d]);
            a.sixteen_codes = a.sixteen_codes && fused->table_[d] < 16;
        }
        for (std::size_t code = 0; code < std::min<std::size_t>(fused->weight_.size(), 16); ++code) {
            const auto word = static_cast<std::uint16_t>(fused->weight_[code]);
            fused->weight_low_[code] = static_cast<std::uint8_t>(word & 255);
            fused->weight_high_[code] = static_cast<std::uint8_t>(word >> 8);
        }
    }
    fused->index_ = scores.index, fused->region_ = softmax.region;
    fused->bias_rows_ = scores.bias.empty() ? 0 : static_cast<std::int64_t>(scores.bias.size()) / heads;
    for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t r = 0; r < fused->bias_rows_; ++r) {
            fused->bias_.push_back(scores.bias[static_cast<std::size_t>(r * heads + h)]);
        }
    }
    fused->macs_ = scores.macs() + times_v.macs();
    fused->kernels_ = &kernels;
    if (kernels.attention_scratch(a) == 0) return nullptr;
    fused->tag = "attention";
    return fused;
}

// expanded[m, t] = bias[head, index[m, t]]
void FusedAttention::expand_bias(std::int64_t head, std::int32_t* expanded) const {
    const std::int64_t tokens = attention_.tokens;
    const std::int32_t* bias = bias_.data() + head * bias_rows_;
    for (std::int64_t m = 0; m < tokens; ++m) {
        for (std::int64_t t = 0; t < tokens; ++t) {
            expanded[m * bias_stride() + t] = bias[index_[static_cast<std::size_t>(m * tokens + t)]];
        }
    }
}

void FusedAttention::run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t* scratch) const {
    Attention a = attention_;
    a.table = table_.data(), a.weight = weight_.data();
    a.code_by_distance = code_by_distance_, a.weight_low = weight_low_, a.weight_high = weight_high_;
    const std::int64_t channels = heads_ * a.width;
    auto* expanded = reinterpret_cast<std::int32_t*>(scratch);
    std::int64_t expanded_head = -1;
    if (!bias_.empty()) std::memset(expanded, 0, bias_bytes());
    // Items are ordered by head, then by window, so that the bias of a head is expanded once.
    for (std::int64_t item = begin; item < end; ++item) {
        const std::int64_t head = item / windows_, window = item % windows_;
        if (!bias_.empty() && head != expanded_head) {
            expand_bias(head, expanded);
            expanded_head = head;
        }
        const std::uint8_t* q = frame[inputs[0]] + window * a.tokens * 3 * channels + head * a.width;
        std::uint8_t* y = frame[output] + window * a.tokens * channels + head * a.width;
        kernels_->attention(a, q, q + channels, q + 2 * channels, bias_.empty() ? nullptr : expanded,
                            region_.empty() ? nullptr : region_.data() + window * a.tokens, y, scratch + bias_bytes());
    }
}

}  // namespace fqvit
