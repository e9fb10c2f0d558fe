#include "core/fuse.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

namespace fqvit {
namespace {

// qkv [.., T, 3 H D] -> context [.., T, H D], what seven ops do: three permutes, scores, softmax, times V, permute.
class Heads final : public Op {
public:
    Attention attention{};
    std::int64_t windows, heads;
    std::vector<std::int32_t> table, bias;  // bias: [H, R]
    std::vector<std::uint16_t> index;
    std::vector<std::uint8_t> region;
    std::vector<std::int16_t> weight;
    std::uint8_t by_distance[256] = {}, weight_low[16] = {}, weight_high[16] = {};
    std::int64_t bias_rows = 0;
    const Kernels* kernels;
    std::int64_t macs_ = 0;

    std::int64_t items() const override { return heads * windows; }
    std::int64_t macs() const override { return macs_; }
    std::size_t bytes() const override { return (table.size() + bias.size()) * 4 + index.size() * 2 + region.size(); }

    std::size_t scratch() const override { return kernels->attend_scratch(attention) + bias_bytes(); }

    void run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t* scratch) const override {
        Attention one = attention;
        one.table = table.data(), one.weight = weight.data();
        one.by_distance = by_distance, one.weight_low = weight_low, one.weight_high = weight_high;
        const std::int64_t tokens = one.tokens, width = one.width, channels = heads * width;
        auto* expanded = reinterpret_cast<std::int32_t*>(scratch);
        std::int64_t expanded_head = -1;
        if (!bias.empty()) std::memset(expanded, 0, bias_bytes());
        // Windows in turn, so that a head's bias is laid out once for all of them.
        for (std::int64_t item = begin; item < end; ++item) {
            const std::int64_t head = item / windows, window = item % windows;
            if (!bias.empty() && head != expanded_head) {
                const std::int32_t* own = bias.data() + head * bias_rows;
                for (std::int64_t m = 0; m < tokens; ++m) {
                    for (std::int64_t t = 0; t < tokens; ++t)
                        expanded[m * bias_stride() + t] = own[index[static_cast<std::size_t>(m * tokens + t)]];
                }
                expanded_head = head;
            }
            const std::uint8_t* q = frame[inputs[0]] + window * tokens * 3 * channels + head * width;
            std::uint8_t* y = frame[output] + window * tokens * channels + head * width;
            kernels->attend(one, q, q + channels, q + 2 * channels, bias.empty() ? nullptr : expanded,
                            region.empty() ? nullptr : region.data() + window * tokens, y, scratch + bias_bytes());
        }
    }

private:
    // Rows as long as kernels read them.
    std::int64_t bias_stride() const { return (attention.tokens + 15) / 16 * 16; }
    std::size_t bias_bytes() const {
        return bias.empty() ? 0 : static_cast<std::size_t>(attention.tokens * bias_stride()) * 4;
    }
};

class Fuser {
public:
    Fuser(std::vector<std::unique_ptr<Op>>& ops, const std::vector<int>& kept, const Machine& machine)
        : ops_(ops),
          kept_(kept.begin(), kept.end()),
          machine_(machine) {
        for (std::size_t i = 0; i < ops.size(); ++i) {
            writer_[ops[i]->output] = i;
            for (const int in : ops[i]->inputs) ++uses_[in];
        }
    }

    void run() {
        for (std::size_t i = 0; i < ops_.size(); ++i) {
            if (dynamic_cast<Context*>(ops_[i].get()) || dynamic_cast<MatMul*>(ops_[i].get())) attention(i);
        }
        for (std::size_t i = 0; i < ops_.size(); ++i) {
            if (const auto* lookup = dynamic_cast<Lookup*>(ops_[i].get())) {
                Linear* linear = producer<Linear>(lookup->inputs[0]);
                if (linear != nullptr && linear->join(*lookup)) move_here(linear, i);
            } else if (const auto* add = dynamic_cast<Add*>(ops_[i].get())) {
                if (add->acc() < 0) continue;
                Linear* linear = producer<Linear>(add->inputs[static_cast<std::size_t>(add->acc())]);
                if (linear != nullptr && linear->join(ops_[i])) move_here(linear, i);
            }
        }
        for (std::unique_ptr<Op>& op : ops_) {
            if (auto* linear = dynamic_cast<Linear*>(op.get())) gathered(*linear);
        }
        std::erase_if(ops_, [](const std::unique_ptr<Op>& op) { return op == nullptr; });
    }

private:
    // The op that writes a value which only one op reads; null if it is of another kind.
    template <class T>
    T* producer(int value) {
        const auto found = writer_.find(value);
        if (found == writer_.end() || uses_[value] != 1 || kept_.contains(value)) return nullptr;
        return dynamic_cast<T*>(ops_[found->second].get());
    }

    // The joined op runs where the last of its parts did: everything that it reads is there by then.
    void move_here(Op* op, std::size_t place) {
        for (std::unique_ptr<Op>& other : ops_) {
            if (other.get() == op) {
                std::unique_ptr<Op> moved = std::move(other);
                ops_[place] = std::move(moved);
                writer_[ops_[place]->output] = place;
                return;
            }
        }
    }

    // A convolution is a take of each place's neighbours, seen as one row, and a linear map.
    void gathered(Linear& linear) {
        int x = linear.inputs[0];
        auto* seen = producer<Permute>(x);
        if (seen != nullptr && !seen->moves_nothing()) return;
        if (seen != nullptr) x = seen->inputs[0];
        if (producer<Take>(x) == nullptr || !linear.read_by(ops_[writer_[x]])) return;
        if (seen != nullptr) ops_[writer_[seen->output]] = nullptr;
    }

    void attention(std::size_t place) {
        Op* times_v = ops_[place].get();
        if (times_v == nullptr) return;
        auto* context = dynamic_cast<Context*>(times_v);
        auto* uniform = dynamic_cast<MatMul*>(times_v);
        auto* softmax = producer<RowSoftmax>(times_v->inputs[0]);
        if (softmax == nullptr || (uniform != nullptr && (!uniform->b_rows || !uniform->bias.empty()))) return;
        auto* scores = producer<MatMul>(softmax->inputs[0]);
        if (scores == nullptr || scores->b_rows) return;
        auto* q = producer<Permute>(scores->inputs[0]);
        auto* k = producer<Permute>(scores->inputs[1]);
        auto* v = producer<Permute>(times_v->inputs[1]);
        if (q == nullptr || k == nullptr || v == nullptr || uses_[times_v->output] != 1 ||
            kept_.contains(times_v->output))
            return;
        Permute* joined = nullptr;
        std::size_t joined_place = 0;
        for (std::size_t i = place + 1; i < ops_.size(); ++i) {
            if (ops_[i] != nullptr && ops_[i]->inputs[0] == times_v->output)
                joined = dynamic_cast<Permute*>(ops_[i].get()), joined_place = i;
        }
        if (joined == nullptr) return;
        // [W], H, T, D
        const Shape& shape = v->value.shape;
        const std::size_t lead = shape.size() - 3;
        if (shape.size() < 3 || shape.size() > 4 || q->value.shape != shape || k->value.shape != shape) return;
        const std::int64_t heads = shape[lead], tokens = shape[lead + 1], width = shape[lead + 2];
        Shape view(shape.begin(), shape.begin() + static_cast<std::ptrdiff_t>(lead)), perm, back_view = shape,
                                                                                            back_shape = view;
        view.insert(view.end(), {tokens, 3, heads, width});
        for (std::size_t i = 0; i < lead; ++i) perm.push_back(static_cast<std::int64_t>(i));
        const auto n = static_cast<std::int64_t>(lead);
        perm.insert(perm.end(), {n + 1, n, n + 2});
        back_shape.insert(back_shape.end(), {tokens, heads * width});
        const auto takes = [&](const Permute* p, std::int64_t part) {
            return p->view == view && p->perm == perm && p->select == Shape({n + 1, part}) &&
                   p->inputs[0] == q->inputs[0];
        };
        if (!takes(q, 0) || !takes(k, 1) || !takes(v, 2)) return;
        if (joined->view != back_view || joined->perm != perm || !joined->select.empty() ||
            joined->value.shape != back_shape)
            return;
        const auto narrow = [](const Op* op) { return op->value.dtype == DType::u8; };
        if (!narrow(v) || !narrow(q) || !narrow(scores) || !narrow(softmax) || !narrow(times_v)) return;
        // Kernels hold codes less their zero point in 16 bits; rows are divided by their sum after row_codes, and only
        // there.
        if (std::max({scores->a_zero, scores->b_zero, context != nullptr ? context->v_zero : uniform->b_zero}) > 255)
            return;
        if ((softmax->kind == Attention::RELATIVE) != (context != nullptr && context->largest > 0)) return;

        auto fused = std::make_unique<Heads>();
        Attention& a = fused->attention;
        a.tokens = tokens, a.width = width;
        a.q_stride = a.k_stride = a.v_stride = 3 * heads * width, a.y_stride = heads * width;
        a.q_zero = static_cast<std::int32_t>(scores->a_zero), a.k_zero = static_cast<std::int32_t>(scores->b_zero);
        a.score_zero = static_cast<std::int32_t>(scores->y_zero),
        a.score_last = static_cast<std::int32_t>(scores->last);
        a.score_mult = scores->mult, a.score_shift = static_cast<int>(scores->shift);
        a.kind = softmax->kind;
        fused->table = softmax->table;
        a.table_length = static_cast<std::int64_t>(fused->table.size());
        a.falling = std::is_sorted(fused->table.rbegin(), fused->table.rend());
        // Kernels also multiply the entries of distances that are not in the row: at most its sum where the table
        // falls.
        if (a.kind == Attention::UNIFORM && !a.falling) return;
        a.softmax_mult = softmax->mult, a.softmax_shift = static_cast<int>(softmax->shift);
        a.softmax_last = static_cast<std::int32_t>(softmax->last);
        std::vector<std::int32_t> weight;
        if (context != nullptr) {
            weight = context->weight;
            a.largest = context->largest;
            a.mult = context->mult, a.shift = static_cast<int>(context->shift);
            a.v_zero = static_cast<std::int32_t>(context->v_zero);
            a.y_zero = static_cast<std::int32_t>(context->y_zero), a.y_last = static_cast<std::int32_t>(context->last);
        } else {
            for (std::int64_t code = 0; code <= softmax->last; ++code)
                weight.push_back(static_cast<std::int32_t>(code - uniform->a_zero));
            a.mult = uniform->mult, a.shift = static_cast<int>(uniform->shift);
            a.v_zero = static_cast<std::int32_t>(uniform->b_zero);
            a.y_zero = static_cast<std::int32_t>(uniform->y_zero), a.y_last = static_cast<std::int32_t>(uniform->last);
        }
        const auto [least, most] = std::minmax_element(weight.begin(), weight.end());
        if (*most > 32768 || *least < -32767) return;
        a.sign = *most == 32768 ? -1 : 1;
        for (const std::int32_t w : weight) fused->weight.push_back(static_cast<std::int16_t>(a.sign * w));
        a.codes = static_cast<std::int32_t>(weight.size());
        if (a.kind == Attention::RELATIVE) {
            a.sixteen = true;
            for (std::size_t d = 0; d < std::min<std::size_t>(fused->table.size(), 256); ++d) {
                fused->by_distance[d] = static_cast<std::uint8_t>(fused->table[d]);
                a.sixteen = a.sixteen && fused->table[d] < 16;
            }
            for (std::size_t code = 0; code < std::min<std::size_t>(weight.size(), 16); ++code) {
                const auto word = static_cast<std::uint16_t>(fused->weight[code]);
                fused->weight_low[code] = static_cast<std::uint8_t>(word & 255),
                fused->weight_high[code] = static_cast<std::uint8_t>(word >> 8);
            }
        }
        a.masked_code = static_cast<std::int32_t>(a.kind == Attention::LOG       ? softmax->last
                                                  : a.kind == Attention::UNIFORM ? 0
                                                                                 : fused->table.back());
        fused->index = scores->index, fused->region = softmax->region;
        fused->windows = lead == 1 ? shape[0] : 1, fused->heads = heads;
        fused->bias_rows = scores->bias.empty() ? 0 : static_cast<std::int64_t>(scores->bias.size()) / heads;
        for (std::int64_t h = 0; h < heads; ++h) {
            for (std::int64_t r = 0; r < fused->bias_rows; ++r)
                fused->bias.push_back(scores->bias[static_cast<std::size_t>(r * heads + h)]);
        }
        fused->kernels = machine_.kernels;
        fused->macs_ = scores->macs() + times_v->macs();
        if (machine_.kernels->attend == nullptr || machine_.kernels->attend_scratch(a) == 0) return;
        fused->tag = "attention";
        fused->inputs = {q->inputs[0]};
        fused->output = joined->output, fused->value = joined->value;
        uses_[q->inputs[0]] -= 2;
        for (Op* part : std::initializer_list<Op*>{q, k, v, scores, softmax, times_v})
            ops_[writer_[part->output]] = nullptr;
        ops_[joined_place] = std::move(fused);
    }

    std::vector<std::unique_ptr<Op>>& ops_;
    std::set<int> kept_;
    Machine machine_;
    std::map<int, std::size_t> writer_;
    std::map<int, int> uses_;
};

}  // namespace

void fuse(std::vector<std::unique_ptr<Op>>& ops, const std::vector<int>& kept, const Machine& machine) {
    Fuser(ops, kept, machine).run();
}

}  // namespace fqvit
