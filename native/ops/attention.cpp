// The ops of attention, each run separately. core/fuse.cpp replaces them with FusedAttention if the kernels support it.
#include <algorithm>

#include "kernels/scalar/attention_scalar.h"
#include "ops/ops.h"
#include "ops/record.h"

namespace fqvit {
namespace {

Shape leading(const Shape& shape) { return {shape.begin(), shape.end() - 2}; }

// The size of an axis counted from the end: 1 is the last.
std::int64_t from_end(const Shape& shape, std::size_t i) { return shape[shape.size() - i]; }

}  // namespace

MatMul::MatMul(const Record& record, const Scope& scope) {
    require_fields(record, 2, 7, 2);
    const Value &a = codes_input(record, scope, 0, 2), &b = codes_input(record, scope, 1, 2);
    b_rows = in_range(record.ints[4], 0, 1, "b_rows") == 1;
    const std::int64_t columns = from_end(b.shape, b_rows ? 1 : 2);
    inner = from_end(b.shape, b_rows ? 2 : 1);
    require(leading(a.shape) == leading(b.shape) && a.channels() == inner, "inputs: shapes ", a.shape, " and ", b.shape,
            ", expected equal leading axes and ", inner, " channels in the first");
    mult = in_range(record.ints[0], 0, MAX_MULT, "mult");
    shift = in_range(record.ints[1], 1, MAX_SHIFT, "shift");
    a_zero = in_range(record.ints[2], 0, MAX_CODE, "a_zero");
    b_zero = in_range(record.ints[3], 0, MAX_CODE, "b_zero");
    Shape shape = a.shape;
    shape.back() = columns;
    value = codes_value(record.ints[6], shape);
    y_zero = in_range(record.ints[5], 0, value.hi, "y_zero"), last = value.hi;
    wide_a = a.is_wide(), wide_b = b.is_wide();
    std::int64_t bound = bound_multiply(inner, magnitude(a, a_zero, a_zero) * magnitude(b, b_zero, b_zero));
    const Array &table = record.arrays[0], &indices = record.arrays[1];
    heads = 0;
    if (count_of(indices) > 0) {
        require(shape.size() >= 3, "bias: output of shape ", shape, ", expected an axis of heads");
        heads = from_end(shape, 3);
        require(table.dtype == DType::i32 && table.shape.size() == 2 && table.shape[1] == heads && table.shape[0] > 0,
                "bias: ", table.dtype, " ", table.shape, ", expected i32 [R, ", heads, "]");
        const Shape slice(shape.end() - 2, shape.end());
        require(indices.dtype == DType::u16 && indices.shape == slice, "index: ", indices.dtype, " ", indices.shape,
                ", expected u16 ", slice);
        bias = read_as<std::int32_t>(table, -(MAX_MULT + 1), MAX_MULT, "bias");
        index = read_as<std::uint16_t>(indices, 0, table.shape[0] - 1, "index");
        std::int64_t largest = 0;
        for (const std::int64_t entry : bias) largest = std::max(largest, entry < 0 ? -entry : entry);
        bound = bound_add(bound, largest);
    }
    prove(bound, 31, "accumulator");
}

void MatMul::run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t*) const {
    const Codes a{frame[inputs[0]], wide_a}, b{frame[inputs[1]], wide_b};
    const scalar::Product product = {.rows = from_end(value.shape, 2),
                                     .columns = value.channels(),
                                     .inner = inner,
                                     .a_zero = a_zero,
                                     .b_zero = b_zero,
                                     .b_rows = b_rows,
                                     .mult = mult,
                                     .shift = static_cast<int>(shift),
                                     .zero = y_zero,
                                     .last = last,
                                     .wide = value.is_wide(),
                                     .bias = bias.empty() ? nullptr : bias.data(),
                                     .index = index.data(),
                                     .heads = heads};
    for (std::int64_t row = begin; row < end; ++row) scalar::matmul_row(product, a, b, frame[output], row);
}

Softmax::Softmax(const Record& record, const Scope& scope) {
    const bool log = record.tag == "log_softmax", uniform = record.tag == "softmax";
    kind = log ? Attention::LOG : uniform ? Attention::UNIFORM : Attention::RELATIVE;
    require_fields(record, 1, log ? 1 : uniform ? 3 : 0, 2);
    const Value& x = codes_input(record, scope, 0, 3);
    require(x.lo == 0, "input 0: the lowest code is ", x.lo, ", expected 0");
    wide_in = x.is_wide();
    const std::int64_t tokens = x.channels();
    const Array &entries = record.arrays[0], &regions = record.arrays[1];
    const bool masked = count_of(regions) > 0;
    if (masked) {
        require(x.shape.size() == 4 && from_end(x.shape, 2) == tokens, "region: scores of shape ", x.shape,
                ", expected [W, H, T, T]");
        require(regions.dtype == DType::u8 && regions.shape == Shape({x.shape[0], tokens}), "region: ", regions.dtype,
                " ", regions.shape, ", expected u8 [", x.shape[0], ", ", tokens, "]");
        region = read_as<std::uint8_t>(regions, 0, 255, "region");
    }
    const DType entry_type = kind == Attention::RELATIVE ? DType::u8 : DType::i32;
    require(entries.dtype == entry_type && entries.shape.size() == 1 && entries.shape[0] > 0, "table: ", entries.dtype,
            " ", entries.shape, ", expected ", entry_type, " with one axis");
    table = read_as<std::int32_t>(entries, 0, MAX_MULT, "table");
    const std::int64_t largest = *std::max_element(table.begin(), table.end());
    if (kind == Attention::RELATIVE) {
        last = largest;
        value = Value{DType::u8, x.shape, 0, largest};
        value.row_code = table.front();
        value.mask_code = masked ? table.back() : -1;
        return;
    }
    require(table.front() > 0, "table: entry 0 is ", table.front(), ", expected a positive exponential");
    prove(bound_multiply(tokens, largest), 31, "sum of exponentials");
    if (kind == Attention::LOG) {
        last = (std::int64_t{1} << in_range(record.ints[0], 2, 4, "bits")) - 1;
        value = Value{DType::u8, x.shape, 0, last};
        value.row_sum = 3 * (std::int64_t{1} << (last - 1)) + tokens;
        value.masked = masked;
        return;
    }
    mult = in_range(record.ints[0], 1, (std::int64_t{1} << 58) - 1, "mult");
    shift = in_range(record.ints[1], 1, 52, "shift");
    value = codes_value(record.ints[2], x.shape);
    last = value.hi;
    prove(bound_add(mult + 2 * largest, std::int64_t{1} << (shift - 1)), 63, "softmax");
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

WeightedSum::WeightedSum(const Record& record, const Scope& scope) {
    const bool divides = record.tag == "attend";
    require_fields(record, 2, divides ? 5 : 7, divides ? 1 : 0);
    const Value &a = codes_input(record, scope, 0, 3), &v = codes_input(record, scope, 1, 3);
    require(a.dtype == DType::u8 && (!divides || v.dtype == DType::u8), "inputs: ", a.dtype, " and ", v.dtype,
            ", expected u8");
    require(leading(a.shape) == leading(v.shape) && a.channels() == from_end(v.shape, 2), "inputs: shapes ", a.shape,
            " and ", v.shape, ", expected [.., M, T] and [.., T, D]");
    inner = a.channels();
    wide_v = v.is_wide();
    v_zero = in_range(record.ints[2], 0, MAX_CODE, "v_zero");
    const std::int64_t v_largest = magnitude(v, v_zero, v_zero);
    mult = in_range(record.ints[0], 0, divides ? (std::int64_t{1} << 29) - 1 : MAX_MULT, "mult");
    shift = in_range(record.ints[1], 1, MAX_SHIFT, "shift");
    Shape shape = a.shape;
    shape.back() = v.channels();
    if (!divides) {
        const std::int64_t a_bits = in_range(record.ints[3], 2, 4, "a_bits");
        const std::int64_t last_code = (std::int64_t{1} << a_bits) - 1;
        require(a.hi == last_code, "input 0: codes up to ", a.hi, ", expected up to ", last_code);
        const bool zero_code = in_range(record.ints[4], 0, 1, "zero_code") == 1;
        require(zero_code || !a.masked, "zero_code: 0 with masked attention, expected 1: the last code has weight 0");
        for (std::int64_t code = 0; code <= last_code; ++code) weight.push_back(1 << (last_code - code));
        if (zero_code) weight.back() = 0;
        const std::int64_t row_sum = a.row_sum >= 0 ? a.row_sum : bound_shift(inner, static_cast<int>(a.hi));
        prove(bound_multiply(v_largest, row_sum), 31, "accumulator");
        value = codes_value(record.ints[6], shape);
        y_zero = in_range(record.ints[5], 0, value.hi, "y_zero");
    } else {
        weight = read_as<std::int32_t>(record.arrays[0], 0, std::int64_t{1} << 15, "levels");
        if (weight.empty()) {
            for (std::int32_t code = 0; code < 256; ++code) weight.push_back(code);
        }
        require(static_cast<std::int64_t>(weight.size()) > a.hi && weight.size() <= 256, "levels: ", weight.size(),
                " entries, expected one per code, ", a.hi + 1, " to 256");
        largest_weight = *std::max_element(weight.begin(), weight.end());
        require(largest_weight > 0 && a.row_code >= 0 && weight[static_cast<std::size_t>(a.row_code)] == largest_weight,
                "levels: a row may lack the largest weight, expected the output of row_codes, whose first code has it");
        require(a.mask_code < 0 || weight[static_cast<std::size_t>(a.mask_code)] == 0,
                "levels: the masked code has a nonzero weight, expected 0");
        const std::int64_t weights = bound_multiply(inner, largest_weight);
        prove(bound_multiply(v_largest, weights), 31, "accumulator");
        const std::int64_t row_mult = bound_add(mult * largest_weight, weights);
        prove(row_mult, 63, "multiplier of a row");
        prove(bound_add(bound_multiply(v_largest, row_mult), std::int64_t{1} << (shift - 1)), 63, "attention times V");
        value = codes_value(record.ints[4], shape);
        y_zero = in_range(record.ints[3], 0, value.hi, "y_zero");
    }
    last = value.hi;
}

void WeightedSum::run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t*) const {
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
    for (std::int64_t row = begin; row < end; ++row) {
        scalar::weighted_sum_row(sum, frame[inputs[0]], v, frame[output], row);
    }
}

}  // namespace fqvit
