// Reads the fields of a record. Every function throws BadProgram if a field breaks a rule.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/bounds.h"
#include "ops/op.h"

namespace fqvit {

constexpr std::int64_t MAX_MULT = (std::int64_t{1} << 31) - 1, MAX_SHIFT = 62, MAX_CODE = 65535, MAX_ALPHA = 15;

// Checks the number of inputs, integers and arrays.
void require_fields(const Record& record, std::size_t inputs, std::size_t ints, std::size_t arrays);

// Return input i of the record.
const Value& value_input(const Record& record, const Scope& scope, std::size_t i);   // a buffer or a constant
const Value& buffer_input(const Record& record, const Scope& scope, std::size_t i);  // a buffer of any type
const Value& codes_input(const Record& record, const Scope& scope, std::size_t i,
                         std::size_t min_axes = 1);  // a buffer of u8 or u16

// Returns the value if it is in lo..hi.
std::int64_t in_range(std::int64_t value, std::int64_t lo, std::int64_t hi, const char* name);

std::int64_t count_of(const Array& array);
// Returns all elements of an array of any integer type, each in lo..hi.
std::vector<std::int64_t> read_integers(const Array& array, std::int64_t lo, std::int64_t hi, const char* name);
// Returns the elements as T. T must hold lo..hi.
template <class T>
std::vector<T> read_as(const Array& array, std::int64_t lo, std::int64_t hi, const char* name) {
    const std::vector<std::int64_t> values = read_integers(array, lo, hi, name);
    std::vector<T> out(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) out[i] = static_cast<T>(values[i]);
    return out;
}
// Returns one entry per channel. A single element applies to all channels.
std::vector<std::int32_t> read_channels(const Array& array, std::int64_t channels, std::int64_t lo, std::int64_t hi,
                                        const char* name);
// Returns the exponents (0..15) of power-of-two factors, one per channel; all are 0 if the array is empty.
std::vector<std::int32_t> read_alphas(const Array& array, std::int64_t channels, const char* name);
void require_channels(std::int64_t channels);

// Returns the Value of a buffer of unsigned codes: u8 up to 8 bits, else u16.
Value codes_value(std::int64_t bits, Shape shape);
// The largest |x - zero| for x in the range of the value and a zero point in zero_lo..zero_hi.
std::int64_t magnitude(const Value& value, std::int64_t zero_lo, std::int64_t zero_hi);
// Requires bound < 2^bits, which proves |x| < 2^bits for every |x| <= bound.
void prove(std::int64_t bound, int bits, const char* name);

}  // namespace fqvit
