// The ops of a program as they are stored: the fields of each op, with the names, types and defaults of the file.
// src/fqvit/ir/ops.py, attention.py, elementwise.py and moves.py define their meaning. Only the types are checked
// here; the constructors in native/ops/ check everything else.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "core/value.h"

namespace fqvit {

using OptionalName = std::optional<std::string>;  // the name of a constant, if there is one

// Zero points: one for all channels, one per group of channels (groups have equal sizes), or the name of a u8 or u16
// [C] constant.
struct Zero {
    std::vector<std::int64_t> values{0};
    OptionalName constant{};
};

struct LookupFields {
    static constexpr const char* TAG = "lookup";
    std::string y, x;
    OptionalName alpha{};
    std::vector<std::int64_t> y_zero{};
    std::int64_t bits = 8;
};

enum class LinearOut : std::uint8_t { codes, acc, i32 };

struct LinearFields {
    static constexpr const char* TAG = "linear";
    std::string y, x;
    LinearOut out = LinearOut::codes;
    Zero y_zero{};
    std::int64_t bits = 8, group = 0;
    OptionalName weights_of{};
    std::int64_t width = 0, codebooks = 0;

    // Whether the weights are stored in fewer than 8 bits each.
    bool packed() const { return group != 0 || width != 0 || codebooks != 0; }
    // Returns the parts that store the weights: "w" first.
    std::vector<const char*> weight_parts() const {
        if (codebooks != 0) return {"w", "choice", "codebooks"};
        if (group != 0) return {"w", "exponent"};
        return {"w"};
    }
    // Returns the name of the constant that stores a part of the weights. It belongs to the op `weights_of` if that is
    // set.
    std::string weight_part(const char* part) const { return weights_of.value_or(y) + "." + part; }
};

struct LayerNormFields {
    static constexpr const char* TAG = "layernorm";
    std::string y, x;
    std::int64_t epsilon = 0, shift = 0, b_shift = 0;
    Zero zero{};
    OptionalName alpha{};
    std::int64_t bits = 8;
    bool center = true;
    std::int64_t fraction = 24;
};

// A multiplier: one number, or the name of an i32 constant with one multiplier per channel (add) or per head (matmul).
struct Multiplier {
    std::int64_t value = 0;
    OptionalName constant{};
};

struct TermFields {
    std::string x;
    Multiplier mult{};
    Zero zero{};
    OptionalName alpha{};
};

struct AddFields {
    static constexpr const char* TAG = "add";
    std::string y;
    std::array<TermFields, 2> terms{};
    std::int64_t shift = 0;
    Zero y_zero{};
    OptionalName y_alpha{};
    std::int64_t bits = 8;
};

struct MeanFields {
    static constexpr const char* TAG = "mean";
    std::string y, x;
    std::int64_t mult = 0, shift = 0, skip = 0;
    Zero zero{};
    OptionalName alpha{};
    std::int64_t y_zero = 0, bits = 8;
};

struct TakeFields {
    static constexpr const char* TAG = "take";
    std::string y, x, index;
    Zero fill{};
};

struct PermuteFields {
    static constexpr const char* TAG = "permute";
    std::string y, x;
    Shape view{}, perm{}, shape{};
    std::optional<std::array<std::int64_t, 2>> select{};
};

struct ConcatFields {
    static constexpr const char* TAG = "concat";
    std::string y;
    std::vector<std::string> xs{};
};

struct MatMulFields {
    static constexpr const char* TAG = "matmul";
    std::string y, a, b;
    Multiplier mult{};
    std::int64_t shift = 0, a_zero = 0, b_zero = 0;
    bool b_rows = false;
    OptionalName index{};
    std::int64_t y_zero = 0, bits = 8;
};

struct LogSoftmaxFields {
    static constexpr const char* TAG = "log_softmax";
    std::string y, x;
    std::int64_t bits = 4;
    OptionalName region{};
};

struct SoftmaxFields {
    static constexpr const char* TAG = "softmax";
    std::string y, x;
    std::int64_t mult = 0, shift = 0, bits = 8;
    OptionalName region{};
};

struct RowCodesFields {
    static constexpr const char* TAG = "row_codes";
    std::string y, x;
    OptionalName region{};
};

struct ShiftMatMulFields {
    static constexpr const char* TAG = "shift_matmul";
    std::string y, a, v;
    std::int64_t mult = 0, shift = 0, v_zero = 0, a_bits = 4;
    bool zero_code = false;
    std::int64_t y_zero = 0, bits = 8;
};

struct AttendFields {
    static constexpr const char* TAG = "attend";
    std::string y, a, v;
    std::int64_t mult = 0, shift = 0;
    std::vector<std::int64_t> levels{};
    std::int64_t v_zero = 0, y_zero = 0, bits = 8;
};

struct MultiplyFields {
    static constexpr const char* TAG = "multiply";
    std::string y, a, b;
    std::int64_t mult = 0, shift = 0, a_zero = 0, b_zero = 0, y_zero = 0, bits = 8;
};

struct RotaryFields {
    static constexpr const char* TAG = "rotary";
    std::string y, x, partner;
    std::int64_t mult = 0, shift = 0, zero = 0, y_zero = 0, bits = 8;
};

struct DepthwiseFields {
    static constexpr const char* TAG = "depthwise";
    std::string y, x, index;
    Zero fill{}, y_zero{};
    std::int64_t bits = 8;
};

struct MaxFields {
    static constexpr const char* TAG = "max";
    std::string y, x;
};

using OpFields =
    std::variant<LookupFields, LinearFields, LayerNormFields, AddFields, MeanFields, TakeFields, PermuteFields,
                 ConcatFields, MatMulFields, LogSoftmaxFields, SoftmaxFields, RowCodesFields, ShiftMatMulFields,
                 AttendFields, MultiplyFields, RotaryFields, DepthwiseFields, MaxFields>;

// The name of the buffer that an op writes.
inline const std::string& output_of(const OpFields& op) {
    return std::visit([](const auto& fields) -> const std::string& { return fields.y; }, op);
}

}  // namespace fqvit
