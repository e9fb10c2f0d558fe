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
    mults_ = product.mults;
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
                                                     const AttentionLayout& layout, const Kernels& kernels) {
    if (kernels.attention == nullptr) return nullptr;
    auto fused = std::make_unique<FusedAttention>();
    const HeadSizes sizes = HeadSizes::of(scores.value.shape);  // [..., H, M, T]
    const std::int64_t heads = sizes.heads;
    fused->layout_ = layout;
    fused->windows_ = sizes.windows, fused->heads_ = heads, fused->queries_ = sizes.tokens;
    Attention& a = fused->attention_;
    a.queries = sizes.tokens, a.tokens = sizes.width, a.width = scores.inner, a.value_width = times_v.value.channels();
    a.q_stride = layout.q.token, a.k_stride = layout.k.token, a.v_stride = layout.v.token, a.y_stride = layout.y.token;
    // A few heads with many queries do not occupy all threads, so their queries are split into blocks, although every
    // block packs the keys and values again.
    constexpr std::int64_t MANY_ITEMS = 16, BLOCK = 252;  // a multiple of the 6 rows of a tile
    if (softmax.region.empty() && heads * sizes.windows < MANY_ITEMS && a.queries > BLOCK) {
        fused->blocks_ = (a.queries + BLOCK - 1) / BLOCK;
        a.queries = BLOCK;
    }
    a.q_zero = static_cast<std::int32_t>(scores.a_zero), a.k_zero = static_cast<std::int32_t>(scores.b_zero);
    a.score_zero = static_cast<std::int32_t>(scores.y_zero), a.score_last = static_cast<std::int32_t>(scores.last);
    fused->score_mults_ = scores.mults;
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
    a.sixteen_codes = a.kind == Attention::RELATIVE || softmax.last < 16;
    for (std::size_t d = 0; a.kind == Attention::RELATIVE && d < std::min<std::size_t>(fused->table_.size(), 256);
         ++d) {
        fused->code_by_distance_[d] = static_cast<std::uint8_t>(fused->table_[d]);
        a.sixteen_codes = a.sixteen_codes && fused->table_[d] < 16;
    }
    for (std::size_t code = 0; code < std::min<std::size_t>(fused->weight_.size(), 16); ++code) {
        const auto word = static_cast<std::uint16_t>(fused->weight_[code]);
        fused->weight_low_[code] = static_cast<std::uint8_t>(word & 255);
        fused->weight_high_[code] = static_cast<std::uint8_t>(word >> 8);
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
    fused->bytes_ = AttentionBytes(fused->head(), static_cast<std::int64_t>(fused->weight_.size()));
    if (kernels.attention_scratch(fused->head()) == 0) return nullptr;
    fused->tag = "attention";
    return fused;
}

Attention FusedAttention::head() const {
    Attention a = attention_;
    a.table = table_.data(), a.weight = weight_.data();
    a.code_by_distance = code_by_distance_, a.weight_low = weight_low_, a.weight_high = weight_high_;
    a.bytes = &bytes_;
    return a;
}

void FusedAttention::expand_bias(std::int64_t head, std::int64_t first, std::int64_t count,
                                 std::int32_t* expanded) const {
    const std::int64_t tokens = attention_.tokens, stride = bias_stride();
    const std::int32_t* bias = bias_.data() + head * bias_rows_;
    const std::int32_t* index = index_.data() + first * tokens;
    for (std::int64_t m = 0; m < count; ++m, index += tokens, expanded += stride) {
        for (std::int64_t t = 0; t < tokens; ++t) expanded[t] = bias[index[t]];
    }
}

void FusedAttention::run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t* scratch) const {
    Attention a = head();
    auto* expanded = reinterpret_cast<std::int32_t*>(scratch);
    std::int64_t expanded_block = -1, packed_head = -1;
    if (!bias_.empty()) std::memset(expanded, 0, bias_bytes());
    // Items are ordered by head, then by block of queries, then by window, so that each bias is expanded once.
    for (std::int64_t item = begin; item < end; ++item) {
        const std::int64_t block = item / windows_, window = item % windows_;
        const std::int64_t h = block / blocks_, first = block % blocks_ * attention_.queries;
        a.queries = std::min(attention_.queries, queries_ - first);
        if (!score_mults_.empty()) a.score_mult = score_mults_[static_cast<std::size_t>(h)];
        if (!mults_.empty()) a.mult = mults_[static_cast<std::size_t>(h)];
        if (!bias_.empty() && block != expanded_block) {
            expand_bias(h, first, a.queries, expanded);
            expanded_block = block;
        }
        const auto at = [&](const HeadLayout& layout, std::int64_t token) {
            return layout.offset + window * layout.window + h * layout.head + token * layout.token;
        };
        a.same_keys = windows_ == 1 && h == packed_head;
        packed_head = h;
        kernels_->attention(a, frame[inputs[0]] + at(layout_.q, first), frame[inputs[1]] + at(layout_.k, 0),
                            frame[inputs[2]] + at(layout_.v, 0), bias_.empty() ? nullptr : expanded,
                            region_.empty() ? nullptr : region_.data() + window * a.tokens,
                            frame[output] + at(layout_.y, first), scratch + bias_bytes());
    }
}

}  // namespace fqvit
