// The type, shape and range of a buffer, known before anything runs. Follows the same rules as src/fqvit/ir/value.py.
// Loading a program that breaks a rule throws BadProgram, so run() needs no checks.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <vector>

namespace fqvit {

// Sizes are computed in 64 bits without overflow checks: MAX_OPS buffers of MAX_ELEMENTS need less than 2^63 bytes. One
// buffer of MAX_ELEMENTS has at most 2^31 bytes, which also fits in the std::size_t of WebAssembly; memory_size()
// checks larger sizes there.

// What is wrong with a program, without a full stop: "<thing>: <found>, expected <what>".
class BadProgram : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

// A BadProgram whose message ends with a remedy. To messages without one, the loader adds that the file is damaged.
class BadProgramWithRemedy : public BadProgram {
public:
    using BadProgram::BadProgram;
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

inline const char* name_of(DType dtype) {
    constexpr const char* NAMES[] = {"u8", "i8", "u16", "i16", "i32", "i64"};
    return NAMES[static_cast<std::size_t>(dtype)];
}

using Shape = std::vector<std::int64_t>;

// One part of an error message. Keeps a pointer to its argument, which must outlive it.
class MessagePart {
public:
    MessagePart(const char* text) : kind_(TEXT), text_(text) {}
    MessagePart(const std::string& text) : kind_(TEXT), text_(text.c_str()) {}
    MessagePart(DType dtype) : kind_(TEXT), text_(name_of(dtype)) {}
    MessagePart(const Shape& shape) : kind_(SHAPE), shape_(&shape) {}
    template <std::integral T>
    MessagePart(T number) : kind_(NUMBER), number_(static_cast<std::int64_t>(number)) {}
    std::string str() const;

private:
    enum { TEXT, NUMBER, SHAPE } kind_;
    union {
        const char* text_;
        std::int64_t number_;
        const Shape* shape_;
    };
};

// Throws BadProgram with all parts joined.
[[noreturn]] void fail(std::initializer_list<MessagePart> parts);

// Fails if the condition is false. Messages read "<thing>: <found>, expected <what>".
template <class... Parts>
void require(bool condition, const Parts&... parts) {
    if (!condition) [[unlikely]]
        fail({MessagePart(parts)...});
}

constexpr std::int64_t MAX_ELEMENTS = std::int64_t{1} << 28;  // a buffer has fewer, a constant at most this many
constexpr std::int64_t MAX_CHANNELS = std::int64_t{1} << 20;  // per computed buffer: parameters are stored per channel
constexpr std::size_t MAX_AXES = 8;
constexpr std::size_t MAX_OPS = 8192;  // the arena planner compares each buffer with all others

// Returns the number of elements. Every axis must be positive and the product at most MAX_ELEMENTS.
inline std::int64_t elements(const Shape& shape) {
    std::int64_t count = 1;
    for (const std::int64_t size : shape) {
        require(size >= 1 && size <= MAX_ELEMENTS && count <= MAX_ELEMENTS / size, "shape: ", shape,
                ", expected positive sizes and at most ", MAX_ELEMENTS, " elements");
        count *= size;
    }
    return count;
}

struct Value {
    DType dtype;
    Shape shape;
    std::int64_t lo, hi;        // every element is in lo..hi
    std::int64_t row_sum = -1;  // output of log_softmax: bound of sum 2^(last - a) over a row; -1: unknown
    bool masked = false;        // output of log_softmax: the last code means "no attention"
    int row_code = -1;          // output of row_codes: a code that every row contains; -1: unknown
    int mask_code = -1;         // output of row_codes: the code that means "no attention"; -1: none

    std::int64_t channels() const { return shape.back(); }
    std::int64_t count() const { return elements(shape); }
    std::int64_t rows() const { return count() / channels(); }
    std::int64_t bytes() const { return count() * size_of(dtype); }
    bool is_codes() const { return dtype == DType::u8 || dtype == DType::u16; }
    bool is_wide() const { return dtype == DType::u16; }
};

}  // namespace fqvit
