// Constructs the op that the given fields describe.
#include "ops/op.h"

#include "ops/elementwise.h"
#include "ops/ops.h"

namespace fqvit {
namespace {

template <class T>
std::unique_ptr<Op> make(const T& fields, Scope& scope) {
    if constexpr (std::is_same_v<T, LookupFields>) return std::make_unique<Lookup>(fields, scope);
    if constexpr (std::is_same_v<T, LinearFields>) return std::make_unique<Linear>(fields, scope);
    if constexpr (std::is_same_v<T, LayerNormFields>) return make_layernorm(fields, scope);
    if constexpr (std::is_same_v<T, AddFields>) return std::make_unique<Add>(fields, scope);
    if constexpr (std::is_same_v<T, MeanFields>) return make_mean(fields, scope);
    if constexpr (std::is_same_v<T, TakeFields>) return std::make_unique<Take>(fields, scope);
    if constexpr (std::is_same_v<T, PermuteFields>) return std::make_unique<Permute>(fields, scope);
    if constexpr (std::is_same_v<T, ConcatFields>) return make_concat(fields, scope);
    if constexpr (std::is_same_v<T, MatMulFields>) return std::make_unique<MatMul>(fields, scope);
    if constexpr (std::is_same_v<T, LogSoftmaxFields>) return std::make_unique<Softmax>(fields, scope);
    if constexpr (std::is_same_v<T, SoftmaxFields>) return std::make_unique<Softmax>(fields, scope);
    if constexpr (std::is_same_v<T, RowCodesFields>) return std::make_unique<Softmax>(fields, scope);
    if constexpr (std::is_same_v<T, ShiftMatMulFields>) return std::make_unique<WeightedSum>(fields, scope);
    if constexpr (std::is_same_v<T, AttendFields>) return std::make_unique<WeightedSum>(fields, scope);
    if constexpr (std::is_same_v<T, MultiplyFields>) return make_multiply(fields, scope);
    if constexpr (std::is_same_v<T, RotaryFields>) return make_rotary(fields, scope);
    if constexpr (std::is_same_v<T, DepthwiseFields>) return std::make_unique<Depthwise>(fields, scope);
    if constexpr (std::is_same_v<T, MaxFields>) return make_max(fields, scope);
}

}  // namespace

std::unique_ptr<Op> make_op(const OpFields& fields, Scope& scope) {
    std::unique_ptr<Op> op = std::visit([&](const auto& alternative) { return make(alternative, scope); }, fields);
    op->tag = std::visit([](const auto& alternative) { return alternative.TAG; }, fields);
    const Shape& shape = op->value.shape;
    require(shape.size() <= MAX_AXES, "shape ", shape, " has more than ", MAX_AXES, " axes");
    require(elements(shape) < MAX_ELEMENTS, "shape ", shape, " is too large");
    // Ops that only move values have no per-channel parameters, so their number of channels is not limited.
    const bool moved = std::holds_alternative<PermuteFields>(fields) || std::holds_alternative<ConcatFields>(fields);
    require(moved || shape.back() <= MAX_CHANNELS, "too many channels: ", shape.back(), ", at most ", MAX_CHANNELS);
    return op;
}

}  // namespace fqvit
