// What is known of a buffer before anything runs, as in src/fqvit/ir/value.py: type, shape, and the integers it can
// hold. A program that breaks a rule raises BadProgram; nothing of it has run by then.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace fqvit {

// A thousand buffers of the largest kind fit 64 bits, so sizes are added and multiplied without asking.
static_assert(sizeof(std::size_t) >= 8);

class BadProgram : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

enum class DType : std::uint8_t { u8, i8, u16, i16, i32, i64 };

inline std::int64_t size_of(DType dtype) {
    switch (dtype) {
        case DType::u8:
        case DType::i8: return 1;
        case DType::u16:
        case DType::i16: return 2;
        case DType::i32: return 4;
        default: return 8;
    }
}

using Shape = std::vector<std::int64_t>;

constexpr std::int64_t MAX_ELEMENTS = std::int64_t{1} << 28;  // of one buffer of one image
constexpr std::int64_t MAX_CHANNELS = std::int64_t{1}
                                      << 20;  // of what is computed: parameters are written down for each
constexpr std::size_t MAX_AXES = 8;
constexpr std::size_t MAX_OPS = 8192;  // planning compares each with all others

// The number of elements, or BadProgram where it passes MAX_ELEMENTS or an axis is not positive.
inline std::int64_t elements(const Shape& shape) {
    std::int64_t count = 1;
    for (const std::int64_t size : shape) {
        if (size < 1 || size > MAX_ELEMENTS || count > MAX_ELEMENTS / size) throw BadProgram("a shape is impossible");
        count *= size;
    }
    return count;
}

struct Value {
    DType dtype;
    Shape shape;
    std::int64_t lo, hi;
    std::int64_t row_sum = -1;  // codes of log_softmax: bound of sum 2^(last - a) over a row
    bool masked = false;        // and whether the last one stands for no attention
    int row_code = -1;          // codes of row_codes: one that every row holds
    int mask_code = -1;         // and the one that stands for no attention

    std::int64_t channels() const { return shape.back(); }
    std::int64_t count() const { return elements(shape); }
    std::int64_t rows() const { return count() / channels(); }
    std::int64_t bytes() const { return count() * size_of(dtype); }
    bool is_codes() const { return dtype == DType::u8 || dtype == DType::u16; }
};

// Bounds are counted in int64 and stick at its end, which no proof admits.
constexpr std::int64_t UNBOUNDED = std::numeric_limits<std::int64_t>::max();

inline std::int64_t bound_add(std::int64_t a, std::int64_t b) { return a > UNBOUNDED - b ? UNBOUNDED : a + b; }
inline std::int64_t bound_multiply(std::int64_t a, std::int64_t b) {
    return b != 0 && a > UNBOUNDED / b ? UNBOUNDED : a * b;
}
inline std::int64_t bound_shift(std::int64_t a, int shift) { return bound_multiply(a, std::int64_t{1} << shift); }

}  // namespace fqvit
