#include "ops/scope.h"

#include <algorithm>
#include <cstring>

namespace fqvit {
namespace {

bool is_one_of(DType dtype, std::initializer_list<DType> dtypes) {
    return std::find(dtypes.begin(), dtypes.end(), dtype) != dtypes.end();
}

std::string list_of(std::initializer_list<DType> dtypes) {
    std::string out;
    for (const DType dtype : dtypes) out += (out.empty() ? "" : " or ") + std::string(name_of(dtype));
    return out;
}

void require_channels(std::int64_t channels) {
    require(channels <= MAX_CHANNELS, "too many channels: ", channels, ", at most ", MAX_CHANNELS);
}

}  // namespace

int Values::add(Value value, const std::string& name, bool constant) {
    const int number = static_cast<int>(values.size());
    values.push_back(std::move(value));
    is_constant.push_back(constant), names.push_back(name), data.emplace_back();
    numbers.emplace(name, number);
    return number;
}

bool Scope::is_operand(const std::string& name) const {
    return values_.is_constant[static_cast<std::size_t>(values_.numbers.at(name))];
}

Operand Scope::buffer(const std::string& name, std::initializer_list<DType> dtypes, std::size_t min_axes) const {
    require(is_buffer(name), "reads '", name, "' before any op writes it");
    const int number = values_.numbers.at(name);
    const Value& value = values_.values[static_cast<std::size_t>(number)];
    require(is_one_of(value.dtype, dtypes), "'", name, "' is ", value.dtype, ", expected ", list_of(dtypes));
    require(value.shape.size() >= min_axes, "'", name, "' has shape ", value.shape, ", expected ", min_axes,
            " axes or more");
    return {number, value, false};
}

Operand Scope::buffer_or_constant(const std::string& name, std::initializer_list<DType> dtypes) {
    if (is_buffer(name)) return buffer(name, dtypes);
    const Constants::Entry& found = entry(name);
    require(is_one_of(found.dtype, dtypes) && found.bytes() > 0, "constant '", name, "' is ", found.dtype, " ",
            found.shape, ", expected ", list_of(dtypes), " and at least one element");
    if (!values_.numbers.contains(name)) {
        const Constant constant = constants_.read(name);
        std::int64_t lo = MAX_MULT, hi = -MAX_MULT;
        for_each_element(constant, [&](std::int64_t x) { lo = std::min(lo, x), hi = std::max(hi, x); });
        values_.add(Value{constant.dtype, constant.shape, lo, hi}, name, true);
        values_.data.back().assign(constant.bytes.begin(), constant.bytes.end());
    }
    const int number = values_.numbers.at(name);
    return {number, values_.values[static_cast<std::size_t>(number)], true};
}

const Constants::Entry& Scope::entry(const std::string& name) const {
    const Constants::Entry* found = hidden_.contains(name) ? nullptr : constants_.find(name);
    require(found != nullptr, "constant '", name, "' is missing");
    return *found;
}

Constant Scope::constant(const std::string& name, std::initializer_list<DType> dtypes) const {
    const Constants::Entry& found = entry(name);
    require(is_one_of(found.dtype, dtypes), "constant '", name, "' is ", found.dtype, ", expected ", list_of(dtypes));
    require(found.bytes() > 0, "constant '", name, "' is empty");
    return constants_.read(name);
}

Constant Scope::constant(const std::string& name, std::initializer_list<DType> dtypes, const Shape& shape) const {
    const Constants::Entry& found = entry(name);
    bool fits = found.shape.size() == shape.size();
    for (std::size_t i = 0; fits && i < shape.size(); ++i) fits = shape[i] == ANY || shape[i] == found.shape[i];
    require(fits, "constant '", name, "' has shape ", found.shape, ", expected ", shape);
    return constant(name, dtypes);
}

std::vector<std::int32_t> Scope::zeros(const Zero& zero, std::int64_t channels, std::int64_t lo, std::int64_t hi,
                                       const char* name) const {
    require_channels(channels);
    std::vector<std::int64_t> entries = zero.values;
    if (zero.constant.has_value()) {
        entries = read_as<std::int64_t>(constant(*zero.constant, {DType::u8, DType::u16}, {channels}), lo, hi, name);
    }
    const auto groups = static_cast<std::int64_t>(entries.size());
    require(groups > 0 && channels % groups == 0, name, ": ", groups, " zero points for ", channels, " channels");
    std::vector<std::int32_t> out(static_cast<std::size_t>(channels));
    for (const std::int64_t entry : entries) in_range(in_range(entry, 0, MAX_CODE, name), lo, hi, name);
    const std::int64_t group = channels / groups;
    for (std::int64_t c = 0; c < channels; ++c) {
        out[static_cast<std::size_t>(c)] = static_cast<std::int32_t>(entries[static_cast<std::size_t>(c / group)]);
    }
    return out;
}

std::vector<std::int32_t> Scope::alphas(const OptionalName& name, std::int64_t channels) const {
    require_channels(channels);
    if (!name.has_value()) return std::vector<std::int32_t>(static_cast<std::size_t>(channels));
    return read_as<std::int32_t>(constant(*name, {DType::u8}, {channels}), 0, MAX_ALPHA, name->c_str());
}

std::int64_t in_range(std::int64_t value, std::int64_t lo, std::int64_t hi, const char* name) {
    require(value >= lo && value <= hi, name, ": ", value, ", expected ", lo, " to ", hi);
    return value;
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
    if (bound <= largest) return;
    const std::string reached = bound == UNBOUNDED ? "2^63" : std::to_string(bound);
    throw BadProgramWithRemedy(std::string(name) + " can reach " + reached + ", which does not fit " +
                               std::to_string(bits) + " bits. Lower the bit widths of this site or its weights");
}

}  // namespace fqvit
