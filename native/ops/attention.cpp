// The ops of attention one by one. fuse.cpp joins them to whole heads where the machine has a kernel for that.
#include <algorithm>

#include "kernels/scalar/attention_scalar.h"
#include "ops/ops.h"

namespace fqvit {
namespace {

constexpr std::int64_t MAX_MULT = (std::int64_t{1} << 31) - 1;

Shape leading(const Shape& shape) { return {shape.begin(), shape.end() - 2}; }

std::int64_t from_end(const Shape& shape, std::size_t i) { return shape[shape.size() - i]; }

}  // namespace

MatMul::MatMul(const Record& record, const Scope& scope) {
    shape_of_record(record, 2, 7, 2);
    const Value &a = input(record, scope, 0, 2), &b = input(record, scope, 1, 2);
    b_rows = within(record.ints[4], 0, 1, "b_rows") == 1;
    const std::int64_t columns = from_end(b.shape, b_rows ? 1 : 2);
    inner = from_end(b.shape, b_rows ? 2 : 1);
    need(leading(a.shape) == leading(b.shape) && a.channels() == inner, "factors do not fit");
    mult = within(record.ints[0], 0, MAX_MULT, "mult"), shift = within(record.ints[1], 1, 62, "shift");
    a_zero = within(record.ints[2], 0, 65535, "a_zero"), b_zero = within(record.ints[3], 0, 65535, "b_zero");
    Shape shape = a.shape;
    shape.back() = columns;
    value = codes(record.ints[6], shape);
    y_zero = within(record.ints[5], 0, value.hi, "y_zero"), last = value.hi;
    wide_a = a.dtype == DType::u16, wide_b = b.dtype == DType::u16;
    std::int64_t bound = bound_multiply(inner, magnitude(a, a_zero, a_zero) * magnitude(b, b_zero, b_zero));
    const Array& places = record.arrays[1];
    heads = 0;
    if (count_of(places) > 0) {
        need(shape.size() >= 3, "a bias needs heads");
        heads = from_end(shape, 3);
        const Array& table = record.arrays[0];
        need(table.dtype == DType::i32 && table.shape.size() == 2 && table.shape[1] == heads && table.shape[0] > 0,
             "bias must be i32 [R, H]");
        need(places.dtype == DType::u16 && places.shape == Shape(shape.end() - 2, shape.end()),
             "index must be u16 [M, N]");
        std::int64_t largest = 0;
        for (const std::int64_t entry : integers(table, -(MAX_MULT + 1), MAX_MULT, "bias")) {
            largest = std::max(largest, entry < 0 ? -entry : entry);
            bias.push_back(static_cast<std::int32_t>(entry));
        }
        for (const std::int64_t i : integers(places, 0, table.shape[0] - 1, "index"))
            index.push_back(static_cast<std::uint16_t>(i));
        bound = bound_add(bound, largest);
    }
    prove(bound, 31, "an accumulator");
}

void MatMul::run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t*) const {
    const scalar::Codes a{frame[inputs[0]], wide_a}, b{frame[inputs[1]], wide_b};
    const scalar::Product product = {from_end(value.shape, 2),
                                     value.channels(),
                                     inner,
                                     a_zero,
                                     b_zero,
                                     b_rows,
                                     mult,
                                     static_cast<int>(shift),
                                     y_zero,
                                     last,
                                     value.dtype == DType::u16,
                                     bias.empty() ? nullptr : bias.data(),
                                     index.data(),
                                     heads};
    for (std::int64_t row = begin; row < end; ++row) scalar::matmul_row(product, a, b, frame[output], row);
}

RowSoftmax::RowSoftmax(const Record& record, const Scope& scope) {
    const bool log = record.tag == "log_softmax", uniform = record.tag == "softmax";
    kind = log ? Attention::LOG : uniform ? Attention::UNIFORM : Attention::RELATIVE;
    shape_of_record(record, 1, log ? 1 : uniform ? 3 : 0, 2);
    const Value& x = input(record, scope, 0, 3);
    need(x.lo == 0, "scores must be unsigned codes");
    wide_in = x.dtype == DType::u16;
    const std::int64_t tokens = x.channels();
    const Array& places = record.arrays[1];
    const bool masked = count_of(places) > 0;
    if (masked) {
        need(x.shape.size() == 4 && from_end(x.shape, 2) == tokens, "regions need windows and square scores");
        need(places.dtype == DType::u8 && places.shape == Shape({x.shape[0], tokens}), "region must be u8 [W, T]");
        for (const std::int64_t r : integers(places, 0, 255, "region")) region.push_back(static_cast<std::uint8_t>(r));
    }
    const Array& entries = record.arrays[0];
    need(entries.dtype == (kind == Attention::RELATIVE ? DType::u8 : DType::i32) && entries.shape.size() == 1 &&
             entries.shape[0] > 0,
         "the table is of another type");
    for (const std::int64_t e : integers(entries, 0, MAX_MULT, "table")) table.push_back(static_cast<std::int32_t>(e));
    const std::int64_t largest = *std::max_element(table.begin(), table.end());
    if (kind == Attention::RELATIVE) {
        last = largest;
        value = Value{DType::u8, x.shape, 0, largest};
        value.row_code = table.front();
        value.mask_code = masked ? table.back() : -1;
        return;
    }
    need(table.front() > 0, "the table of exponentials must be positive at 0");
    prove(bound_multiply(tokens, largest), 31, "a sum of exponentials");
    if (kind == Attention::LOG) {
        last = (std::int64_t{1} << within(record.ints[0], 2, 4, "bits")) - 1;
        value = Value{DType::u8, x.shape, 0, last};
        value.row_sum = 3 * (std::int64_t{1} << (last - 1)) + tokens;
        value.masked = masked;
        return;
    }
    mult = within(record.ints[0], 1, (std::int64_t{1} << 58) - 1, "mult"),
    shift = within(record.ints[1], 1, 52, "shift");
    value = codes(record.ints[2], x.shape);
    last = value.hi;
    prove(bound_add(mult + 2 * largest, std::int64_t{1} << (shift - 1)), 63, "a softmax");
}

void RowSoftmax::run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t*) const {
    const scalar::Codes x{frame[inputs[0]], wide_in};
    const std::int64_t tokens = value.channels();
    const scalar::Rows rows = {tokens, region.empty() ? 1 : from_end(value.shape, 3) * tokens,
                               region.empty() ? nullptr : region.data(), table.data(),
                               static_cast<std::int64_t>(table.size())};
    std::uint8_t* y = frame[output];
    for (std::int64_t row = begin; row < end; ++row) {
        switch (kind) {
            case Attention::LOG: scalar::log_softmax_row(rows, x, y, row, last); break;
            case Attention::UNIFORM:
                scalar::softmax_row(rows, x, y, value.dtype == DType::u16, row, mult, static_cast<int>(shift), last);
                break;
            case Attention::RELATIVE: scalar::row_codes_row(rows, x, y, row); break;
        }
    }
}

Context::Context(const Record& record, const Scope& scope) {
    const bool divided = record.tag == "attend";
    shape_of_record(record, 2, divided ? 5 : 7, divided ? 1 : 0);
    const Value &a = input(record, scope, 0, 3), &v = input(record, scope, 1, 3);
    need(a.dtype == DType::u8 && (!divided || v.dtype == DType::u8), "attention must be u8");
    need(leading(a.shape) == leading(v.shape) && a.channels() == from_end(v.shape, 2), "attention and V do not fit");
    inner = a.channels();
    wide_v = v.dtype == DType::u16;
    v_zero = within(record.ints[2], 0, 65535, "v_zero");
    const std::int64_t side = magnitude(v, v_zero, v_zero);
    mult = within(record.ints[0], 0, divided ? (std::int64_t{1} << 29) - 1 : MAX_MULT, "mult");
    shift = within(record.ints[1], 1, 62, "shift");
    Shape shape = a.shape;
    shape.back() = v.channels();
    if (!divided) {
        const std::int64_t a_bits = within(record.ints[3], 2, 4, "a_bits"), last_code = (std::int64_t{1} << a_bits) - 1;
        need(a.hi == last_code, "attention has other codes");
        const bool zero_code = within(record.ints[4], 0, 1, "zero_code") == 1;
        need(zero_code || !a.masked, "attention is masked, so its last code must mean 0");
        for (std::int64_t code = 0; code <= last_code; ++code) weight.push_back(1 << (last_code - code));
        if (zero_code) weight.back() = 0;
        const std::int64_t row_sum = a.row_sum >= 0 ? a.row_sum : bound_shift(inner, static_cast<int>(a.hi));
        prove(bound_multiply(side, row_sum), 31, "an accumulator");
        value = codes(record.ints[6], shape);
        y_zero = within(record.ints[5], 0, value.hi, "y_zero");
    } else {
        for (const std::int64_t level : integers(record.arrays[0], 0, std::int64_t{1} << 15, "levels"))
            weight.push_back(static_cast<std::int32_t>(level));
        if (weight.empty()) {
            for (std::int32_t code = 0; code < 256; ++code) weight.push_back(code);
        }
        need(static_cast<std::int64_t>(weight.size()) > a.hi && weight.size() <= 256, "levels do not fit the codes");
        largest = *std::max_element(weight.begin(), weight.end());
        need(largest > 0 && a.row_code >= 0 && weight[static_cast<std::size_t>(a.row_code)] == largest,
             "a row may lack the largest weight");
        need(a.mask_code < 0 || weight[static_cast<std::size_t>(a.mask_code)] == 0,
             "masked positions must have weight 0");
        const std::int64_t weights = bound_multiply(inner, largest);
        prove(bound_multiply(side, weights), 31, "an accumulator");
        prove(bound_add(mult * largest, weights), 63, "a row's multiplier");
        const std::int64_t product = bound_multiply(side, bound_add(mult * largest, weights));
        prove(bound_add(product, std::int64_t{1} << (shift - 1)), 63, "attention times V");
        value = codes(record.ints[4], shape);
        y_zero = within(record.ints[3], 0, value.hi, "y_zero");
    }
    last = value.hi;
}

void Context::run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t*) const {
    const scalar::Context context = {from_end(value.shape, 2),
                                     inner,
                                     value.channels(),
                                     weight.data(),
                                     largest,
                                     v_zero,
                                     mult,
                                     static_cast<int>(shift),
                                     y_zero,
                                     last,
                                     value.dtype == DType::u16};
    for (std::int64_t row = begin; row < end; ++row) {
        scalar::context_row(context, frame[inputs[0]], {frame[inputs[1]], wide_v}, frame[output], row);
    }
}

}  // namespace fqvit
