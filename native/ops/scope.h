// What the constructor of an op may read: the buffers written so far and the constants, by name. Every function throws
// BadProgram if a name, type, shape or number breaks a rule of src/fqvit/ir/value.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "core/aligned.h"
#include "core/bounds.h"
#include "core/dispatch.h"
#include "core/value.h"
#include "ir/constants.h"
#include "ir/op_fields.h"
#include "ops/weights.h"

namespace fqvit {

constexpr std::int64_t MAX_MULT = (std::int64_t{1} << 31) - 1, MAX_SHIFT = 62, MAX_CODE = 65535, MAX_ALPHA = 15;
constexpr std::int64_t ANY = -1;  // any size of an axis

// All values of a program: buffers, and constants that are operands. Each has a number.
struct Values {
    std::vector<Value> values;
    std::vector<bool> is_constant;
    std::vector<std::string> names;
    std::vector<AlignedVector<std::uint8_t>> data;  // of constants; empty for buffers
    std::map<std::string, int, std::less<>> numbers;

    int add(Value value, const std::string& name, bool constant);
};

// An input of an op.
struct Operand {
    int number;
    Value value;
    bool is_constant;
};

class Scope {
public:
    // hidden: constants that this op may not read.
    Scope(Values& values, const Constants& constants, const std::set<std::string>& hidden, WeightStore& weights,
          const KernelSet& kernels)
        : kernels(kernels), weights(weights), values_(values), constants_(constants), hidden_(hidden) {}

    Operand buffer(const std::string& name, std::initializer_list<DType> dtypes, std::size_t min_axes = 1) const;
    Operand codes(const std::string& name, std::size_t min_axes = 1) const {
        return buffer(name, {DType::u8, DType::u16}, min_axes);
    }
    // A buffer, or a constant that becomes a value with its actual minimum and maximum.
    Operand buffer_or_constant(const std::string& name, std::initializer_list<DType> dtypes);
    bool is_buffer(const std::string& name) const { return values_.numbers.contains(name) && !is_operand(name); }

    // Returns a copy of a constant, which must not be empty. shape: ANY stands for any size of an axis.
    Constant constant(const std::string& name, std::initializer_list<DType> dtypes, const Shape& shape) const;
    // The same for any shape.
    Constant constant(const std::string& name, std::initializer_list<DType> dtypes) const;

    // Returns one zero point per channel, each in lo..hi.
    std::vector<std::int32_t> zeros(const Zero& zero, std::int64_t channels, std::int64_t lo, std::int64_t hi,
                                    const char* name) const;
    // Returns the exponents (0..15) of power-of-two factors, one per channel; 0 if there is no constant.
    std::vector<std::int32_t> alphas(const OptionalName& name, std::int64_t channels) const;

    const KernelSet& kernels;
    WeightStore& weights;

private:
    bool is_operand(const std::string& name) const;
    const Constants::Entry& entry(const std::string& name) const;

    Values& values_;
    const Constants& constants_;
    const std::set<std::string>& hidden_;
};

// Returns the value if it is in lo..hi.
std::int64_t in_range(std::int64_t value, std::int64_t lo, std::int64_t hi, const char* name);

// Calls visit(element) for each element of a constant.
template <class Visit>
void for_each_element(const Constant& constant, const Visit& visit) {
    const auto visit_all = [&](const auto* data) {
        for (std::int64_t i = 0; i < constant.count(); ++i) visit(std::int64_t{data[i]});
    };
    switch (constant.dtype) {
        case DType::u8: visit_all(constant.as<std::uint8_t>()); break;
        case DType::i8: visit_all(constant.as<std::int8_t>()); break;
        case DType::u16: visit_all(constant.as<std::uint16_t>()); break;
        case DType::i16: visit_all(constant.as<std::int16_t>()); break;
        case DType::i32: visit_all(constant.as<std::int32_t>()); break;
        case DType::i64: visit_all(constant.as<std::int64_t>()); break;
    }
}

// Returns the elements of a constant as T, after checking that each is in lo..hi. T must be able to
// represent lo..hi.
template <class T>
std::vector<T> read_as(const Constant& constant, std::int64_t lo, std::int64_t hi, const char* name) {
    std::vector<T> out;
    out.reserve(static_cast<std::size_t>(constant.count()));
    for_each_element(constant, [&](std::int64_t x) { out.push_back(static_cast<T>(in_range(x, lo, hi, name))); });
    return out;
}

// Returns the Value of a buffer of unsigned codes: u8 up to 8 bits, else u16.
Value codes_value(std::int64_t bits, Shape shape);
// The largest |x - zero| for x in the range of the value and a zero point in zero_lo..zero_hi.
std::int64_t magnitude(const Value& value, std::int64_t zero_lo, std::int64_t zero_hi);
// Requires bound < 2^bits, which proves |x| < 2^bits for every |x| <= bound.
void prove(std::int64_t bound, int bits, const char* name);

}  // namespace fqvit
