#include "detect/batch_program.h"

#include <algorithm>

namespace fqvit {
namespace {

constexpr std::int64_t MIN_ROWS = 64;

[[noreturn]] void reject(const std::string& y) {
    throw BadProgram(y + ": this op cannot run on a batch of RoIs, expected an op of a detector's head");
}

const Shape& shape_of(const Engine& head, const std::string& buffer) { return head.value(head.find(buffer)).shape; }

std::int64_t rows_of(const Engine& head, const std::string& buffer) { return head.value(head.find(buffer)).rows(); }

// Repeats the index once per RoI, offset by the first row of that RoI; -1 stays -1.
Constant repeated(const Constant& index, std::int64_t rows, std::int64_t count) {
    if (rows * count >= MAX_ELEMENTS || index.count() * count >= MAX_ELEMENTS) {
        throw BadProgramWithRemedy("a batch of " + std::to_string(count) +
                                   " RoIs: too many elements for one buffer. Use a smaller batch");
    }
    Constant out{DType::i32, index.shape, {}};
    if (out.shape.empty()) out.shape = {1};
    out.shape[0] *= count;
    out.bytes.resize(index.bytes.size() * static_cast<std::size_t>(count));
    auto* to = reinterpret_cast<std::int32_t*>(out.bytes.data());
    const auto* from = index.as<std::int32_t>();
    for (std::int64_t roi = 0; roi < count; ++roi) {
        for (std::int64_t i = 0; i < index.count(); ++i) {
            *to++ = from[i] < 0 ? -1 : from[i] + static_cast<std::int32_t>(roi * rows);
        }
    }
    return out;
}

// RoIs are concatenated along the first axis, so the op must keep that axis first.
void batch_permute(PermuteFields& op, std::int64_t count) {
    if (op.perm.empty() || op.perm[0] != 0 || (op.select.has_value() && op.select->front() == 0)) reject(op.y);
    if (op.view.size() == 1 && op.shape.empty()) {
        op.view = {1, count, op.view[0]};
        op.perm = {0, 1, 2};
        return;
    }
    if (op.view.size() == 1 || op.shape.size() == 1) reject(op.y);
    op.view[0] *= count;
    if (!op.shape.empty()) op.shape[0] *= count;
}

}  // namespace

Program batched(const Program& program, const Engine& head, std::int64_t count, Header& header) {
    Program made{program.input, {}, program.outputs, program.constants};
    made.input[0] *= count;
    for (const OpFields& op : program.ops) {
        if (const auto* take = std::get_if<TakeFields>(&op)) made.constants.remove(take->index);
    }
    for (OpFields op : program.ops) {
        if (auto* take = std::get_if<TakeFields>(&op)) {
            const std::int64_t rows = rows_of(head, take->x);
            // Several take ops may use the same index for maps of different sizes.
            const std::string name = take->index + ".of" + std::to_string(rows);
            if (!made.constants.contains(name)) {
                made.constants.set(name, repeated(program.constants.read(take->index), rows, count));
            }
            take->index = name;
        } else if (auto* permute = std::get_if<PermuteFields>(&op)) {
            batch_permute(*permute, count);
        } else if (!std::holds_alternative<LinearFields>(op)) {  // a linear op acts on each row
            reject(output_of(op));
        }
        made.ops.push_back(std::move(op));
    }
    const auto change_kind = [&](Output& output) {
        const bool vector = shape_of(head, output.buffer).size() == 1;
        if (vector && output.kind == OutputKind::logits) output.kind = OutputKind::scores;
    };
    change_kind(header.output);
    for (Output& output : header.others) change_kind(output);
    return made;
}

std::int64_t rois_per_batch(const Program& program, const Engine& head) {
    std::int64_t least = MAX_ELEMENTS;
    for (const OpFields& op : program.ops) {
        if (const auto* linear = std::get_if<LinearFields>(&op)) least = std::min(least, rows_of(head, linear->y));
    }
    return (MIN_ROWS + least - 1) / least;
}

}  // namespace fqvit
