// Maps the tag of a record to its op.
#include "ops/op.h"

#include "ops/ops.h"

namespace fqvit {
namespace {

using Make = std::unique_ptr<Op> (*)(const Record&, const Scope&);

template <class T>
std::unique_ptr<Op> make(const Record& record, const Scope& scope) {
    return std::make_unique<T>(record, scope);
}

struct Entry {
    const char* tag;
    Make make;
};

constexpr Entry OPS[] = {
    {"linear", make<Linear>},
    {"lookup", make<Lookup>},
    {"layernorm", make_layernorm},
    {"add", make<Add>},
    {"mean", make_mean},
    {"take", make<Take>},
    {"permute", make<Permute>},
    {"concat", make_concat},
    {"matmul", make<MatMul>},
    {"log_softmax", make<Softmax>},
    {"softmax", make<Softmax>},
    {"row_codes", make<Softmax>},
    {"shift_matmul", make<WeightedSum>},
    {"attend", make<WeightedSum>},
};

Make find(const std::string& tag) {
    for (const Entry& entry : OPS) {
        if (tag == entry.tag) return entry.make;
    }
    fail({"tag: ", tag, ", expected the name of an op"});
}

}  // namespace

std::unique_ptr<Op> make_op(const Record& record, const Scope& scope) {
    std::unique_ptr<Op> op = find(record.tag)(record, scope);
    require(op->value.shape.size() <= MAX_AXES, "output: ", op->value.shape.size(), " axes, expected at most ",
            MAX_AXES);
    elements(op->value.shape);  // throws if the output is too large
    op->tag = record.tag;
    for (const std::int64_t number : record.inputs) op->inputs.push_back(static_cast<int>(number));
    return op;
}

}  // namespace fqvit
