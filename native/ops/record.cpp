// Reading records: the checks that all ops share.
#include <algorithm>

#include "ops/ops.h"

namespace fqvit {

void need(bool condition, const char* problem) {
    if (!condition) throw BadProgram(problem);
}

void shape_of_record(const Record& record, std::size_t inputs, std::size_t ints, std::size_t arrays) {
    need(record.inputs.size() == inputs && record.ints.size() == ints && record.arrays.size() == arrays,
         "a field is missing");
}

const Value& any_input(const Record& record, const Scope& scope, std::size_t i) {
    const std::int64_t number = record.inputs.at(i);
    need(number >= 0 && number < static_cast<std::int64_t>(scope.values.size()), "reads a value that no op wrote");
    return scope.values[static_cast<std::size_t>(number)];
}

const Value& buffer_input(const Record& record, const Scope& scope, std::size_t i) {
    const Value& value = any_input(record, scope, i);
    need(!scope.constant[static_cast<std::size_t>(record.inputs[i])], "reads a constant where a buffer is expected");
    return value;
}

const Value& input(const Record& record, const Scope& scope, std::size_t i, std::size_t min_rank) {
    const Value& value = buffer_input(record, scope, i);
    need(value.is_codes(), "reads accumulators where codes are expected");
    need(value.shape.size() >= min_rank, "an input has too few axes");
    return value;
}

std::int64_t within(std::int64_t value, std::int64_t lo, std::int64_t hi, const char* name) {
    if (value < lo || value > hi) throw BadProgram(std::string(name) + " is out of range");
    return value;
}

std::int64_t count_of(const Array& array) {
    std::int64_t count = 1;
    for (const std::int64_t size : array.shape) {
        if (size == 0) return 0;
        need(size > 0 && size <= MAX_ELEMENTS && count <= MAX_ELEMENTS / size, "a constant has an impossible shape");
        count *= size;
    }
    return count;
}

namespace {

template <class T>
void copy_checked(const Array& array, std::vector<std::int64_t>& out, std::int64_t lo, std::int64_t hi,
                  const char* name) {
    const T* data = static_cast<const T*>(array.data);
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = within(data[i], lo, hi, name);
}

}  // namespace

std::vector<std::int64_t> integers(const Array& array, std::int64_t lo, std::int64_t hi, const char* name) {
    std::vector<std::int64_t> out(static_cast<std::size_t>(count_of(array)));
    switch (array.dtype) {
        case DType::u8: copy_checked<std::uint8_t>(array, out, lo, hi, name); break;
        case DType::i8: copy_checked<std::int8_t>(array, out, lo, hi, name); break;
        case DType::u16: copy_checked<std::uint16_t>(array, out, lo, hi, name); break;
        case DType::i16: copy_checked<std::int16_t>(array, out, lo, hi, name); break;
        case DType::i32: copy_checked<std::int32_t>(array, out, lo, hi, name); break;
        case DType::i64: copy_checked<std::int64_t>(array, out, lo, hi, name); break;
    }
    return out;
}

std::vector<std::int32_t> channels_of(const Array& array, std::int64_t channels, std::int64_t lo, std::int64_t hi,
                                      const char* name) {
    need(channels <= MAX_CHANNELS, "more channels than can be");
    const std::vector<std::int64_t> given = integers(array, lo, hi, name);
    const auto count = static_cast<std::int64_t>(given.size());
    if (count != 1 && count != channels)
        throw BadProgram(std::string(name) + " has neither one entry nor one a channel");
    std::vector<std::int32_t> out(static_cast<std::size_t>(channels));
    for (std::size_t c = 0; c < out.size(); ++c) out[c] = static_cast<std::int32_t>(given[count == 1 ? 0 : c]);
    return out;
}

Value codes(std::int64_t bits, Shape shape) {
    within(bits, 1, 16, "bits");
    return Value{bits <= 8 ? DType::u8 : DType::u16, std::move(shape), 0, (std::int64_t{1} << bits) - 1};
}

std::int64_t magnitude(const Value& value, std::int64_t zero_lo, std::int64_t zero_hi) {
    const std::int64_t up = value.hi - zero_lo, down = value.lo - zero_hi;
    return std::max(up < 0 ? -up : up, down < 0 ? -down : down);
}

void prove(std::int64_t bound, int bits, const char* what) {
    if (bound > (bits == 63 ? UNBOUNDED - 1 : (std::int64_t{1} << bits) - 1))
        throw BadProgram(std::string(what) + " can overflow");
}

std::unique_ptr<Op> make_op(const Record& record, const Scope& scope) {
    const std::string& tag = record.tag;
    std::unique_ptr<Op> op;
    if (tag == "linear")
        op = std::make_unique<Linear>(record, scope);
    else if (tag == "lookup")
        op = std::make_unique<Lookup>(record, scope);
    else if (tag == "layernorm")
        op = make_layernorm(record, scope);
    else if (tag == "add")
        op = std::make_unique<Add>(record, scope);
    else if (tag == "mean")
        op = make_mean(record, scope);
    else if (tag == "take")
        op = std::make_unique<Take>(record, scope);
    else if (tag == "permute")
        op = std::make_unique<Permute>(record, scope);
    else if (tag == "concat")
        op = make_concat(record, scope);
    else if (tag == "matmul")
        op = std::make_unique<MatMul>(record, scope);
    else if (tag == "log_softmax" || tag == "softmax" || tag == "row_codes")
        op = std::make_unique<RowSoftmax>(record, scope);
    else if (tag == "shift_matmul" || tag == "attend")
        op = std::make_unique<Context>(record, scope);
    else
        throw BadProgram("unknown op " + tag);
    need(op->value.shape.size() <= MAX_AXES, "too many axes");
    op->value.count();  // refuses what is too large
    op->tag = tag;
    for (const std::int64_t number : record.inputs) op->inputs.push_back(static_cast<int>(number));
    return op;
}

}  // namespace fqvit
