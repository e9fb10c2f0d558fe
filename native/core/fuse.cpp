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
    Fuser(std::vector<std::unique_ptr<Op>>& ops, const std::vector<int>& outputs, const KernelSet& kernels)
        : ops_(ops), outputs_(outputs.begin(), outputs.end()), kernels_(kernels) {
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
        auto* q = sole_producer<Permute>(scores->inputs[0]);
        auto* k = sole_producer<Permute>(scores->inputs[1]);
        auto* v = sole_producer<Permute>(times_v->inputs[1]);
        if (q == nullptr || k == nullptr || v == nullptr || !is_internal(times_v->output)) return;
        const std::size_t join_index = find_reader(times_v->output, times_v_index);
        const auto* join = join_index == ops_.size() ? nullptr : dynamic_cast<Permute*>(ops_[join_index].get());
        if (join == nullptr || !splits_heads(*q, *k, *v) || !joins_heads(*join, *v)) return;
        for (const Op* op : std::initializer_list<const Op*>{q, v, scores, softmax, times_v}) {
            if (op->value.dtype != DType::u8) return;
        }
        auto fused = FusedAttention::make(*scores, *softmax, *times_v, v->value.shape, *kernels_.kernels);
        if (fused == nullptr) return;
        const int qkv = q->inputs[0];
        fused->inputs = {qkv};
        fused->output = join->output, fused->value = join->value;
        uses_[qkv] -= 2;
        for (const Op* part : std::initializer_list<const Op*>{q, k, v, scores, softmax, times_v}) {
            ops_[writer_[part->output]] = nullptr;
        }
        ops_[join_index] = std::move(fused);
    }

    // The index of the first op after `index` whose first input is the value; ops_.size() if there is none.
    std::size_t find_reader(int value, std::size_t index) const {
        for (std::size_t i = index + 1; i < ops_.size(); ++i) {
            if (ops_[i] != nullptr && ops_[i]->inputs[0] == value) return i;
        }
        return ops_.size();
    }

    // perm of [W, T, H, D] to [W, H, T, D]; without windows, [T, H, D] to [H, T, D].
    static Shape swap_tokens_and_heads(std::size_t lead) {
        const auto n = static_cast<std::int64_t>(lead);
        return lead == 0 ? Shape{1, 0, 2} : Shape{0, n + 1, n, n + 2};
    }

    // Whether q, k and v are parts 0, 1 and 2 of one value [W, T, 3, H, D], each as [W, H, T, D].
    static bool splits_heads(const Permute& q, const Permute& k, const Permute& v) {
        const Shape& shape = v.value.shape;
        if (shape.size() < 3 || shape.size() > 4 || q.value.shape != shape || k.value.shape != shape) return false;
        const std::size_t lead = shape.size() - 3;
        Shape view(shape.begin(), shape.begin() + static_cast<std::ptrdiff_t>(lead));
        view.insert(view.end(), {shape[lead + 1], 3, shape[lead], shape[lead + 2]});
        const Shape perm = swap_tokens_and_heads(lead);
        const auto is_part = [&](const Permute& p, std::int64_t part) {
            return p.view == view && p.perm == perm && p.select == Shape({static_cast<std::int64_t>(lead) + 1, part}) &&
                   p.inputs[0] == q.inputs[0];
        };
        return is_part(q, 0) && is_part(k, 1) && is_part(v, 2);
    }

    // Whether `join` turns [W, H, T, D] into [W, T, H D].
    static bool joins_heads(const Permute& join, const Permute& v) {
        const Shape& shape = v.value.shape;
        const std::size_t lead = shape.size() - 3;
        Shape joined(shape.begin(), shape.begin() + static_cast<std::ptrdiff_t>(lead));
        joined.insert(joined.end(), {shape[lead + 1], shape[lead] * shape[lead + 2]});
        return join.view == shape && join.perm == swap_tokens_and_heads(lead) && join.select.empty() &&
               join.value.shape == joined;
    }

    std::vector<std::unique_ptr<Op>>& ops_;  // null if the op was fused into another
    std::set<int> outputs_;
    KernelSet kernels_;
    std::map<int, std::size_t> writer_;  // index of the op that writes a value
    std::map<int, int> uses_;            // number of ops that read a value
};

}  // namespace

void fuse(std::vector<std::unique_ptr<Op>>& ops, const std::vector<int>& outputs, const KernelSet& kernels) {
    Fuser(ops, outputs, kernels).run();
}

}  // namespace fqvit
