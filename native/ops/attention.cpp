// The ops of attention, each run separately. core/fuse.cpp replaces them with FusedAttention if the kernels support it.
#include <algorithm>

#include "kernels/scalar/attention_scalar.h"
#include "ops/ops.h"

namespace fqvit {
namespace {

Shape leading(const Shape& shape) { return {shape.begin(), shape.end() - 2}; }

// The size of an axis counted from the end: 1 is the last.
std::int64_t from_end(const Shape& shape, std::size_t i) { return shape[shape.size() - i]; }

std::size_t scratch_bytes(std::int64_t inner, std::int64_t columns) {
    return static_cast<std::size_t>(scalar::row_scratch(inner, columns)) * sizeof(std::int32_t);
}

}  // namespace

MatMul::MatMul(const MatMulFields& fields, Scope& scope) : kernels(scope.kernels.kernels) {
    const Operand a_input = scope.codes(fields.a, 2), b_input = scope.codes(fields.b, 2);
    const Value &a = a_input.value, &b = b_input.value;
    inputs = {a_input.number, b_input.number};
    b_rows = fields.b_rows;
    const std::int64_t columns = from_end(b.shape, b_rows ? 1 : 2);
    inner = from_end(b.shape, b_rows ? 2 : 1);
    require(leading(a.shape) == leading(b.shape) && a.channels() == inner, "shapes ", a.shape, " and ", b.shape,
            " do not match");
    shift = in_range(fields.shift, 1, MAX_SHIFT, "shift");
    a_zero = in_range(fields.a_zero, 0, MAX_CODE, "a_zero");
    b_zero = in_range(fields.b_zero, 0, MAX_CODE, "b_zero");
    Shape shape = a.shape;
    shape.back() = columns;
    value = codes_value(fields.bits, shape);
    y_zero = in_range(fields.y_zero, 0, value.hi, "y_zero"), last = value.hi;
    wide_a = a.is_wide(), wide_b = b.is_wide();
    std::int64_t bound = bound_multiply(inner, magnitude(a, a_zero, a_zero) * magnitude(b, b_zero, b_zero));
    const bool per_head = fields.mult.constant.has_value();
    require(shape.size() >= 3 || (!per_head && !fields.index.has_value()), "shape ", shape,
            " with a bias or a multiplier per head, expected an axis of heads");
    heads = per_head || fields.index.has_value() ? from_end(shape, 3) : 0;
    if (per_head) {
        const Constant all = scope.constant(*fields.mult.constant, {DType::i32}, {heads});
        mults = read_as<std::int32_t>(all, 0, MAX_MULT, "mult");
        mult = *std::max_element(mults.begin(), mults.end());
    } else {
        mult = in_range(fields.mult.value, 0, MAX_MULT, "mult");
    }
    if (fields.index.has_value()) {
        const Constant table = scope.constant(fields.y + ".bias", {DType::i32}, {ANY, heads});
        const Shape slice(shape.end() - 2, shape.end());
        const Constant indices = scope.constant(*fields.index, {DType::u16, DType::i32}, slice);
        bias = read_as<std::int32_t>(table, -(MAX_MULT + 1), MAX_MULT, "bias");
        index = read_as<std::int32_t>(indices, 0, table.shape[0] - 1, "index");
        std::int64_t largest = 0;
        for (const std::int64_t entry : bias) largest = std::max(largest, entry < 0 ? -entry : entry);
        bound = bound_add(bound, largest);
    }
    prove(bound, 31, "acc");
}

std::size_t MatMul::scratch() const { return scratch_bytes(inner, value.channels()); }

void MatMul::run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t* scratch) const {
    const Codes a{frame[inputs[0]], wide_a}, b{frame[inputs[1]], wide_b};
    const scalar::Product product = {.rows = from_end(value.shape, 2),
                                     .columns = value.channels(),
                                     .inner = inner,
                                     .a_zero = a_zero,
                                     .b_zero = b_zero,
                                     .b_rows = b_rows,
                                     .mult = mult,
                                     .mults = mults.empty() ? nullptr : mults.data(),
                                     .shift = static_cast<int>(shift),
                                     .zero = y_zero,
                                     .last = last,
                                     .wide = value.is_wide(),
                                     .bias = bias.empty() ? nullptr : bias.data(),
                                     .index = index.data(),
                                     .heads = heads};
    auto* own = reinterpret_cast<std::int32_t*>(scratch);
    for (std::int64_t row = begin; row < end; ++row) {
        scalar::matmul_row(product, a, b, frame[output], row, *kernels, own);
    }
}

Value Softmax::read_scores(const std::string& x, const OptionalName& region_name, Scope& scope) {
    const Operand input = scope.codes(x, 3);
    const Value& scores = input.value;
    inputs = {input.number};
    require(scores.lo == 0, "scores start at ", scores.lo, ", expected unsigned codes");
    wide_in = scores.is_wide();
    if (region_name.has_value()) {
        const std::int64_t tokens = scores.channels();
        require(scores.shape.size() == 4 && from_end(scores.shape, 2) == tokens, "scores of shape ", scores.shape,
                " with regions, expected [W, H, T, T]");
        const Constant regions = scope.constant(*region_name, {DType::u8}, {scores.shape[0], tokens});
        region = read_as<std::uint8_t>(regions, 0, 255, "region");
    }
    return scores;
}

std::int64_t Softmax::read_exponentials(const std::string& y, std::int64_t tokens, Scope& scope) {
    table = read_as<std::int32_t>(scope.constant(y + ".table", {DType::i32}, {ANY}), 0, MAX_MULT, "table");
    require(table.front() > 0, "table: entry 0 is ", table.front(), ", expected a positive exponential");
    const std::int64_t largest = *std::max_element(table.begin(), table.end());
    prove(bound_multiply(tokens, largest), 31, "sum of exponentials");
    return largest;
}

Softmax::Softmax(const LogSoftmaxFields& fields, Scope& scope) : kind(Attention::LOG) {
    const Value x = read_scores(fields.x, fields.region, scope);
    last = (std::int64_t{1} << in_range(fields.bits, 2, 4, "bits")) - 1;
    read_exponentials(fields.y, x.channels(), scope);
    value = Value{DType::u8, x.shape, 0, last};
    value.row_sum = 3 * (std::int64_t{1} << (last - 1)) + x.channels();
    value.masked = !region.empty();
}

Softmax::Softmax(const SoftmaxFields& fields, Scope& scope) : kind(Attention::UNIFORM) {
    const Value x = read_scores(fields.x, fields.region, scope);
    const std::int64_t largest = read_exponentials(fields.y, x.channels(), scope);
    mult = in_range(fields.mult, 1, (std::int64_t{1} << 58) - 1, "mult");
    shift = in_range(fields.shift, 1, 52, "shift");
    value = codes_value(fields.bits, x.shape);
    last = value.hi;
    prove(bound_add(mult + 2 * largest, std::int64_t{1} << (shift - 1)), 63, "y before its shift");
}

Softmax::Softmax(const RowCodesFields& fields, Scope& scope) : kind(Attention::RELATIVE) {
    const Value x = read_scores(fields.x, fields.region, scope);
    table = read_as<std::int32_t>(scope.constant(fields.y + ".table", {DType::u8}, {ANY}), 0, 255, "table");
    last = *std::max_element(table.begin(), table.end());
    value = Value{DType::u8, x.shape, 0, last};
    value.row_code = table.front();
    value.mask_code = region.empty() ? -1 : table.back();
}

void Softmax::run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t*) const {
    const Codes x{frame[inputs[0]], wide_in};
    const std::int64_t tokens = value.channels();
    const scalar::SoftmaxRows rows = {.tokens = tokens,
                                      .rows_of_window = region.empty() ? 1 : from_end(value.shape, 3) * tokens,
                                      .region = region.empty() ? nullptr : region.data(),
                                      .table = table.data(),
                                      .table_length = static_cast<std::int64_t>(table.size())};
    std::uint8_t* y = frame[output];
    for (std::int64_t row = begin; row < end; ++row) {
        switch (kind) {
            case Attention::LOG: scalar::log_softmax_row(rows, x, y, row, last); break;
            case Attention::UNIFORM:
                scalar::softmax_row(rows, x, y, value.is_wide(), row, mult, static_cast<int>(shift), last);
                break;
            case Attention::RELATIVE: scalar::row_codes_row(rows, x, y, row); break;
        }
    }
}

std::pair<Value, Value> WeightedSum::read_inputs(const std::string& a_name, const std::string& v_name, Scope& scope) {
    const Operand a = scope.buffer(a_name, {DType::u8}, 3), v = scope.codes(v_name, 3);
    inputs = {a.number, v.number};
    require(leading(a.value.shape) == leading(v.value.shape) && a.value.channels() == from_end(v.value.shape, 2),
            "shapes ", a.value.shape, " and ", v.value.shape, " do not match");
    inner = a.value.channels();
    wide_v = v.value.is_wide();
    return {a.value, v.value};
}

void WeightedSum::set_output(std::int64_t bits, std::int64_t zero, const Value& a, const Value& v) {
    Shape shape = a.shape;
    shape.back() = v.channels();
    value = codes_value(bits, shape);
    y_zero = in_range(zero, 0, value.hi, "y_zero");
    last = value.hi;
}

WeightedSum::WeightedSum(const ShiftMatMulFields& fields, Scope& scope) : kernels(scope.kernels.kernels) {
    const auto [a, v] = read_inputs(fields.a, fields.v, scope);
    mult = in_range(fields.mult, 0, MAX_MULT, "mult");
    shift = in_range(fields.shift, 1, MAX_SHIFT, "shift");
    v_zero = in_range(fields.v_zero, 0, MAX_CODE, "v_zero");
    const std::int64_t last_code = (std::int64_t{1} << in_range(fields.a_bits, 2, 4, "a_bits")) - 1;
    require(a.hi == last_code, "'", fields.a, "' holds codes up to ", a.hi, ", expected ", fields.a_bits, " bits");
    require(fields.zero_code || !a.masked, "'", fields.a, "' is masked, so its last code must mean 0 (zero_code)");
    for (std::int64_t code = 0; code <= last_code; ++code) weight.push_back(1 << (last_code - code));
    if (fields.zero_code) weight.back() = 0;
    const std::int64_t row_sum = a.row_sum >= 0 ? a.row_sum : bound_shift(inner, static_cast<int>(a.hi));
    prove(bound_multiply(magnitude(v, v_zero, v_zero), row_sum), 31, "acc");
    set_output(fields.bits, fields.y_zero, a, v);
}

WeightedSum::WeightedSum(const AttendFields& fields, Scope& scope) : kernels(scope.kernels.kernels) {
    const auto [a, v] = read_inputs(fields.a, fields.v, scope);
    require(v.dtype == DType::u8, "'", fields.v, "' is ", v.dtype, ", expected u8");
    mult = in_range(fields.mult, 0, (std::int64_t{1} << 29) - 1, "mult");
    shift = in_range(fields.shift, 1, MAX_SHIFT, "shift");
    v_zero = in_range(fields.v_zero, 0, MAX_CODE, "v_zero");
    for (const std::int64_t level : fields.levels) {
        weight.push_back(static_cast<std::int32_t>(in_range(level, 0, std::int64_t{1} << 15, "levels")));
    }
    for (std::int32_t code = 0; fields.levels.empty() && code < 256; ++code) weight.push_back(code);
    require(static_cast<std::int64_t>(weight.size()) > a.hi && weight.size() <= 256, weight.size(),
            " levels for codes up to ", a.hi);
    largest_weight = *std::max_element(weight.begin(), weight.end());
    require(largest_weight > 0 && a.row_code >= 0 && weight[static_cast<std::size_t>(a.row_code)] == largest_weight,
            "a row of '", fields.a, "' may lack the largest weight");
    require(a.mask_code < 0 || weight[static_cast<std::size_t>(a.mask_code)] == 0, "'", fields.a,
            "' is masked by a code whose weight is not 0");
    const std::int64_t v_largest = magnitude(v, v_zero, v_zero), weights = bound_multiply(inner, largest_weight);
    prove(bound_multiply(v_largest, weights), 31, "acc");
    const std::int64_t row_mult = bound_add(mult * largest_weight, weights);
    prove(row_mult, 63, "M numerator");
    const std::int64_t product = bound_multiply(v_largest, row_mult);
    prove(bound_add(product, std::int64_t{1} << (shift - 1)), 63, "y before its shift");
    set_output(fields.bits, fields.y_zero, a, v);
}

std::size_t WeightedSum::scratch() const { return scratch_bytes(inner, value.channels()); }

void WeightedSum::run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t* scratch) const {
    const scalar::WeightedSum sum = {.rows = from_end(value.shape, 2),
                                     .inner = inner,
                                     .width = value.channels(),
                                     .weight = weight.data(),
                                     .largest_weight = largest_weight,
                                     .v_zero = v_zero,
                                     .mult = mult,
                                     .shift = static_cast<int>(shift),
                                     .zero = y_zero,
                                     .last = last,
                                     .wide = value.is_wide()};
    const Codes v{frame[inputs[1]], wide_v};
    auto* own = reinterpret_cast<std::int32_t*>(scratch);
    for (std::int64_t row = begin; row < end; ++row) {
        scalar::weighted_sum_row(sum, frame[inputs[0]], v, frame[output], row, *kernels, own);
    }
}

}  // namespace fqvit
