#include "core/fuse.h"

#include <map>
#include <set>

#include "core/fused_attention.h"
#include "ops/elementwise.h"
#include "ops/ops.h"

namespace fqvit {
namespace {

class Fuser {
public:
    Fuser(std::vector<std::unique_ptr<Op>>& ops, const std::vector<int>& outputs, const KernelSet& kernels,
          bool owns_weights)
        : ops_(ops), outputs_(outputs.begin(), outputs.end()), kernels_(kernels), owns_weights_(owns_weights) {
        for (std::size_t i = 0; i < ops.size(); ++i) {
            writer_[ops[i]->output] = i;
            for (const int input : ops[i]->inputs) ++uses_[input];
        }
    }

    void run() {
        for (std::size_t i = 0; i < ops_.size(); ++i) {
            if (dynamic_cast<WeightedSum*>(ops_[i].get()) || dynamic_cast<MatMul*>(ops_[i].get())) fuse_attention(i);
        }
        for (std::size_t i = 0; i < ops_.size(); ++i) {
            if (const auto* lookup = dynamic_cast<Lookup*>(ops_[i].get())) {
                Linear* linear = sole_producer<Linear>(lookup->inputs[0]);
                Depthwise* depthwise = sole_producer<Depthwise>(lookup->inputs[0]);
                if (linear != nullptr && linear->fuse_lookup(*lookup)) {
                    move_to(linear, i);
                } else if (depthwise != nullptr && depthwise->fuse_lookup(*lookup)) {
                    move_to(depthwise, i);
                }
            } else if (const auto* add = dynamic_cast<Add*>(ops_[i].get())) {
                if (add->acc_term() < 0) continue;
                Linear* linear = sole_producer<Linear>(add->inputs[static_cast<std::size_t>(add->acc_term())]);
                if (linear != nullptr && linear->fuse_add(ops_[i])) move_to(linear, i);
            }
        }
        for (std::unique_ptr<Op>& op : ops_) {
            if (auto* linear = dynamic_cast<Linear*>(op.get())) fuse_take(*linear);
        }
        for (std::unique_ptr<Op>& op : ops_) {
            auto* linear = owns_weights_ ? dynamic_cast<Linear*>(op.get()) : nullptr;
            if (linear != nullptr && sole_producer<Linear>(linear->inputs[0]) != nullptr) {
                sole_producer<Linear>(linear->inputs[0])->group_tables(*linear);
            }
        }
        std::erase_if(ops_, [](const std::unique_ptr<Op>& op) { return op == nullptr; });
    }

private:
    // Whether exactly one op reads the value and it is not an output, so that fusion may remove it.
    bool is_internal(int value) { return uses_[value] == 1 && !outputs_.contains(value); }

    // The op of type T that writes an internal value; null if there is none.
    template <class T>
    T* sole_producer(int value) {
        const auto found = writer_.find(value);
        if (found == writer_.end() || !is_internal(value)) return nullptr;
        return dynamic_cast<T*>(ops_[found->second].get());
    }

    // Moves a fused op to the index of the last op that it replaces, where all its inputs have been written.
    void move_to(Op* op, std::size_t index) {
        for (std::unique_ptr<Op>& other : ops_) {
            if (other.get() == op) {
                std::unique_ptr<Op> moved = std::move(other);
                ops_[index] = std::move(moved);
                writer_[ops_[index]->output] = index;
                return;
            }
        }
    }

    // A convolution is a take that gathers the neighbours of each position, a reshape to one row, and a linear.
    void fuse_take(Linear& linear) {
        int x = linear.inputs[0];
        auto* reshape = sole_producer<Permute>(x);
        if (reshape != nullptr && !reshape->is_reshape()) return;
        if (reshape != nullptr) x = reshape->inputs[0];
        if (sole_producer<Take>(x) == nullptr || !linear.fuse_take(ops_[writer_[x]])) return;
        if (reshape != nullptr) ops_[writer_[reshape->output]] = nullptr;
    }

    // times_v_index: index of the op that multiplies the softmax output by V.
    void fuse_attention(std::size_t times_v_index) {
        Op* times_v = ops_[times_v_index].get();
        const auto* product = dynamic_cast<MatMul*>(times_v);
        auto* softmax = sole_producer<Softmax>(times_v->inputs[0]);
        if (softmax == nullptr || (product != nullptr && (!product->b_rows || !product->bias.empty()))) return;
        auto* scores = sole_producer<MatMul>(softmax->inputs[0]);
        if (scores == nullptr || scores->b_rows) return;
        const auto* sum = dynamic_cast<WeightedSum*>(times_v);
        if (scores->wide_a || scores->wide_b || (sum != nullptr ? sum->wide_v : product->wide_b)) return;
        for (const Op* op : std::initializer_list<const Op*>{scores, softmax, times_v}) {
            if (op->value.dtype != DType::u8) return;
        }
        const auto [windows, heads, queries, tokens] = HeadSizes::of(scores->value.shape);
        const HeadSizes y_sizes{windows, heads, queries, times_v->value.channels()};
        const Heads q = find_heads(scores->inputs[0], {windows, heads, queries, scores->inner});
        const Heads k = find_heads(scores->inputs[1], {windows, heads, tokens, scores->inner});
        const Heads v = find_heads(times_v->inputs[1], {windows, heads, tokens, y_sizes.width});
        std::size_t last = times_v_index;
        std::optional<HeadLayout> y;
        if (const std::size_t reader = find_reader(times_v->output, times_v_index);
            is_internal(times_v->output) && reader < ops_.size()) {
            const auto* join = dynamic_cast<Permute*>(ops_[reader].get());
            if (join != nullptr) y = HeadLayout::after(*join, y_sizes);
            if (y.has_value()) last = reader;
        }
        const AttentionLayout layout{q.layout, k.layout, v.layout, y.value_or(HeadLayout::contiguous(y_sizes))};
        auto fused = FusedAttention::make(*scores, *softmax, *times_v, layout, *kernels_.kernels);
        if (fused == nullptr) return;
        fused->inputs = {q.buffer, k.buffer, v.buffer};
        fused->output = ops_[last]->output, fused->value = ops_[last]->value;
        for (const Heads& operand : {q, k, v}) {
            if (operand.split >= 0) ops_[writer_[operand.split]] = nullptr;
        }
        for (const int value : {scores->output, softmax->output, times_v->output}) ops_[writer_[value]] = nullptr;
        ops_[last] = std::move(fused);
    }

    // An operand of attention: the buffer that holds it, and the output of the permute that fusion removes; -1 if none.
    struct Heads {
        int buffer, split;
        HeadLayout layout;
    };

    // Finds an operand in the input of the permute that splits its heads if possible, else in the value itself.
    Heads find_heads(int value, const HeadSizes& sizes) {
        if (const auto* split = sole_producer<Permute>(value)) {
            const std::optional<HeadLayout> layout = HeadLayout::before(*split, sizes);
            if (layout.has_value()) return {split->inputs[0], value, *layout};
        }
        return {value, -1, HeadLayout::contiguous(sizes)};
    }

    // The index of the first op after `index` whose first input is the value; ops_.size() if there is none.
    std::size_t find_reader(int value, std::size_t index) const {
        for (std::size_t i = index + 1; i < ops_.size(); ++i) {
            if (ops_[i] != nullptr && ops_[i]->inputs[0] == value) return i;
        }
        return ops_.size();
    }

    std::vector<std::unique_ptr<Op>>& ops_;  // null if the op was fused into another
    std::set<int> outputs_;
    KernelSet kernels_;
    bool owns_weights_;
    std::map<int, std::size_t> writer_;  // index of the op that writes a value
    std::map<int, int> uses_;            // number of ops that read a value
};

}  // namespace

void fuse(std::vector<std::unique_ptr<Op>>& ops, const std::vector<int>& outputs, const KernelSet& kernels,
          bool owns_weights) {
    Fuser(ops, outputs, kernels, owns_weights).run();
}

}  // namespace fqvit
