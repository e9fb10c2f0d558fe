#include "ops/record.h"

#include <algorithm>

namespace fqvit {

void require_fields(const Record& record, std::size_t inputs, std::size_t ints, std::size_t arrays) {
    require(record.inputs.size() == inputs && record.ints.size() == ints && record.arrays.size() == arrays,
            "record: ", record.inputs.size(), " inputs, ", record.ints.size(), " integers and ", record.arrays.size(),
            " arrays, expected ", inputs, ", ", ints, " and ", arrays);
}

const Value& value_input(const Record& record, const Scope& scope, std::size_t i) {
    const std::int64_t number = record.inputs.at(i);
    require(number >= 0 && number < static_cast<std::int64_t>(scope.values.size()), "input ", i, ": value ", number,
            ", expected one of the ", scope.values.size(), " values that exist so far");
    return scope.values[static_cast<std::size_t>(number)];
}

const Value& buffer_input(const Record& record, const Scope& scope, std::size_t i) {
    const Value& value = value_input(record, scope, i);
    require(!scope.is_constant[static_cast<std::size_t>(record.inputs[i])], "input ", i, ": value ", record.inputs[i],
            " is a constant, expected a buffer");
    return value;
}

const Value& codes_input(const Record& record, const Scope& scope, std::size_t i, std::size_t min_axes) {
    const Value& value = buffer_input(record, scope, i);
    require(value.is_codes(), "input ", i, ": ", value.dtype, ", expected codes (u8 or u16)");
    require(value.shape.size() >= min_axes, "input ", i, ": shape ", value.shape, ", expected at least ", min_axes,
            " axes");
    return value;
}

std::int64_t in_range(std::int64_t value, std::int64_t lo, std::int64_t hi, const char* name) {
    require(value >= lo && value <= hi, name, ": ", value, ", expected ", lo, " to ", hi);
    return value;
}

std::int64_t count_of(const Array& array) {
    std::int64_t count = 1;
    for (const std::int64_t size : array.shape) {
        if (size == 0) return 0;
        require(size > 0 && size <= MAX_ELEMENTS && count <= MAX_ELEMENTS / size, "array: shape ", array.shape,
                ", expected at most ", MAX_ELEMENTS, " elements");
        count *= size;
    }
    return count;
}

namespace {

template <class T>
void copy_checked(const Array& array, std::vector<std::int64_t>& out, std::int64_t lo, std::int64_t hi,
                  const char* name) {
    const T* data = static_cast<const T*>(array.data);
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = in_range(data[i], lo, hi, name);
}

}  // namespace

std::vector<std::int64_t> read_integers(const Array& array, std::int64_t lo, std::int64_t hi, const char* name) {
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

void require_channels(std::int64_t channels) {
    require(channels <= MAX_CHANNELS, "too many channels: ", channels, ", at most ", MAX_CHANNELS);
}

std::vector<std::int32_t> read_channels(const Array& array, std::int64_t channels, std::int64_t lo, std::int64_t hi,
                                        const char* name) {
    require_channels(channels);
    const std::vector<std::int64_t> entries = read_integers(array, lo, hi, name);
    const auto count = static_cast<std::int64_t>(entries.size());
    require(count == 1 || count == channels, name, ": ", count, " entries, expected 1 or one per channel (", channels,
            ")");
    std::vector<std::int32_t> out(static_cast<std::size_t>(channels));
    for (std::size_t c = 0; c < out.size(); ++c) out[c] = static_cast<std::int32_t>(entries[count == 1 ? 0 : c]);
    return out;
}

std::vector<std::int32_t> read_alphas(const Array& array, std::int64_t channels, const char* name) {
    require_channels(channels);
    if (count_of(array) == 0) return std::vector<std::int32_t>(static_cast<std::size_t>(channels));
    require(array.dtype == DType::u8, name, ": ", array.dtype, ", expected u8");
    return read_channels(array, channels, 0, MAX_ALPHA, name);
}

Value codes_value(std::int64_t bits, Shape shape) {
    in_range(bits, 1, 16, "bits");
    return Value{bits <= 8 ? DType::u8 : DType::u16, std::move(shape), 0, (std::int64_t{1} << bits) - 1};
}

std::int64_t magnitude(const Value& value, std::int64_t zero_lo, std::int64_t zero_hi) {
    const std::int64_t up = value.hi - zero_lo, down = value.lo - zero_hi;
    return std::max(up < 0 ? -up : up, down < 0 ? -down : down);
}

void prove(std::int64_t bound, int bits, const char* name) {
    const std::int64_t largest = bits == 63 ? UNBOUNDED - 1 : (std::int64_t{1} << bits) - 1;
    require(bound <= largest, name, ": can reach ", bound, ", expected less than 2^", bits);
}

}  // namespace fqvit
