// Decodes bytes into records, for the fuzzer (engine_fuzz.cpp), test/programs_test.cpp and test/answers_test.cpp.
// make_seeds.py writes the same format.
//
// Every sequence of bytes is a program; bytes past the end read as 0.
//   program: byte style (see image_of), 3 ints height, width, channels, int output; if bit 2 of the style is set,
//            int count and further outputs; then records up to the end
//   record:  byte tag. A constant (tag 0) has one array; an op has int count and inputs, int count and ints,
//            int count and arrays
//   array:   byte dtype, int number of axes, ints of the shape, then the elements, little-endian
//   int:     a byte below 248 is the value; after 248..251, a signed value of 1, 2, 4 or 8 bytes follows;
//            252..255 stand for -1, 2^30, 2^31 - 1, 2^62
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "core/engine.h"

namespace fqvit::fuzz {

inline const char* const TAGS[] = {"",        "lookup", "linear", "layernorm",   "add",     "mean",         "take",
                                   "permute", "concat", "matmul", "log_softmax", "softmax", "shift_matmul", "row_codes",
                                   "attend"};
constexpr std::size_t TAG_COUNT = sizeof TAGS / sizeof *TAGS;

// Limits that keep a run within milliseconds: records per program, fields per record, elements per array, elements of
// all buffers together, and multiplications per op.
constexpr std::size_t MAX_RECORDS = 400, MAX_FIELDS = 32;
constexpr std::int64_t MAX_ARRAY = 1 << 20, MAX_VALUES = 1 << 24, MAX_WORK = 1 << 26;

// An array that owns its elements.
struct Owned {
    DType dtype;
    Shape shape;
    std::vector<std::uint8_t> data;
    Array view() const { return {dtype, shape, data.data()}; }
};

struct OwnedRecord {
    std::string tag;  // empty: a constant
    std::vector<std::int64_t> inputs, ints;
    std::vector<Owned> arrays;
};

struct Limits {
    std::int64_t values = MAX_VALUES, work = MAX_WORK;
};

struct Program {
    std::uint8_t style = 0;
    Shape image;
    std::vector<std::int64_t> outputs;
    std::vector<OwnedRecord> records;
    bool too_large = false;
};

class Reader {
public:
    Reader(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}
    bool empty() const { return at_ >= size_; }
    std::uint8_t byte() { return at_ < size_ ? data_[at_++] : 0; }

    std::int64_t integer() {
        const std::uint8_t first = byte();
        switch (first) {
            case 248: return static_cast<std::int8_t>(little(1));
            case 249: return static_cast<std::int16_t>(little(2));
            case 250: return static_cast<std::int32_t>(little(4));
            case 251: return static_cast<std::int64_t>(little(8));
            case 252: return -1;
            case 253: return std::int64_t{1} << 30;
            case 254: return (std::int64_t{1} << 31) - 1;
            case 255: return std::int64_t{1} << 62;
            default: return first;
        }
    }

    std::vector<std::int64_t> integers() {
        std::vector<std::int64_t> out(static_cast<std::size_t>(std::clamp<std::int64_t>(integer(), 0, MAX_FIELDS)));
        for (std::int64_t& i : out) i = integer();
        return out;
    }

    Owned array(bool& too_large) {
        Owned out;
        out.dtype = static_cast<DType>(byte() % 6);
        out.shape = integers();
        std::int64_t count = 1;
        bool possible = true;  // the engine must reject an impossible shape before it reads elements
        for (const std::int64_t size : out.shape) {
            possible = possible && size >= 0 && size <= MAX_ELEMENTS && (size == 0 || count <= MAX_ELEMENTS / size);
            count = possible ? count * size : 0;
        }
        too_large = too_large || count > MAX_ARRAY;
        if (count > MAX_ARRAY) count = 0;
        out.data.resize(static_cast<std::size_t>(count * size_of(out.dtype)));
        const std::size_t length = std::min(out.data.size(), size_ - at_);
        if (length > 0) std::memcpy(out.data.data(), data_ + at_, length);
        at_ += length;
        if constexpr (std::endian::native == std::endian::big) {
            const std::ptrdiff_t size = size_of(out.dtype);
            for (auto element = out.data.begin(); element != out.data.end(); element += size)
                std::reverse(element, element + size);
        }
        out.data.shrink_to_fit();  // so that AddressSanitizer sees reads past the end
        return out;
    }

private:
    std::uint64_t little(int bytes) {
        std::uint64_t value = 0;
        for (int i = 0; i < bytes; ++i) value |= std::uint64_t{byte()} << (8 * i);
        return value;
    }

    const std::uint8_t* data_;
    std::size_t size_, at_ = 0;
};

inline std::vector<std::uint8_t> bytes_of(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

inline Program decode(const std::uint8_t* data, std::size_t size) {
    Reader reader(data, size);
    Program program;
    program.style = reader.byte();
    for (int i = 0; i < 3; ++i) program.image.push_back(reader.integer());
    program.outputs.push_back(reader.integer());
    if (program.style & 4) {
        for (const std::int64_t other : reader.integers()) program.outputs.push_back(other);
    }
    while (!reader.empty() && program.records.size() < MAX_RECORDS) {
        OwnedRecord record;
        record.tag = TAGS[reader.byte() % TAG_COUNT];
        std::int64_t arrays = 1;
        if (!record.tag.empty()) {
            record.inputs = reader.integers();
            record.ints = reader.integers();
            arrays = std::clamp<std::int64_t>(reader.integer(), 0, MAX_FIELDS);
        }
        for (std::int64_t i = 0; i < arrays; ++i) record.arrays.push_back(reader.array(program.too_large));
        program.records.push_back(std::move(record));
    }
    return program;
}

// Builds an engine from the program. Returns null if it exceeds the limits; throws BadProgram if the engine rejects it.
inline std::unique_ptr<Engine> build(const Program& program, const std::string& isa, int threads, bool keep,
                                     Limits limits = {}) {
    auto engine = std::make_unique<Engine>(program.image, isa, threads);
    std::int64_t all = engine->value(0).count();
    for (const OwnedRecord& owned : program.records) {
        int number = 0;
        std::int64_t longest = 1;
        if (owned.tag.empty()) {
            number = engine->constant(owned.arrays.front().view());
        } else {
            Record record{owned.tag, owned.inputs, owned.ints, {}};
            for (const Owned& array : owned.arrays) record.arrays.push_back(array.view());
            number = engine->add("y", record);
            for (const std::int64_t in : owned.inputs)
                longest = std::max(longest, engine->value(static_cast<int>(in)).channels());
        }
        all += engine->value(number).count();
        if (all > limits.values || engine->value(number).count() > limits.work / longest) return nullptr;
    }
    std::vector<int> outputs;
    for (const std::int64_t output : program.outputs) {
        // The Python binding rejects numbers that do not fit in an int.
        if (output < -(std::int64_t{1} << 31) || output >= std::int64_t{1} << 31)
            throw BadProgram("output: outside the range of int");
        outputs.push_back(static_cast<int>(output));
    }
    engine->finish(outputs.front(), keep, {outputs.begin() + 1, outputs.end()});
    return engine;
}

// Returns pixels according to style % 4: random, all 0, all 255, or a random mix of 0 and 255.
inline std::vector<std::uint8_t> image_of(const Program& program, std::uint32_t seed) {
    std::vector<std::uint8_t> pixels(static_cast<std::size_t>(elements(program.image)));
    for (std::uint8_t& pixel : pixels) {
        seed = static_cast<std::uint32_t>((std::uint64_t{seed} * 1664525 + 1013904223) & 0xffffffff);
        const auto random = static_cast<std::uint8_t>(seed >> 24);
        pixel = program.style % 4 == 1   ? 0
                : program.style % 4 == 2 ? 255
                : program.style % 4 == 3 ? (random & 1 ? 255 : 0)
                                         : random;
    }
    return pixels;
}

// One array per output, each with all images.
using Outputs = std::vector<std::vector<std::uint8_t>>;

inline Outputs run(Engine& engine, const std::vector<std::uint8_t>& images, std::int64_t count) {
    Outputs found;
    std::vector<std::uint8_t*> ys;
    for (const int number : engine.outputs())
        found.emplace_back(static_cast<std::size_t>(engine.value(number).bytes() * count));
    for (std::vector<std::uint8_t>& y : found) ys.push_back(y.data());
    engine.run_all(images.data(), count, ys);
    return found;
}

// Whether `few` equals the first images of `many`.
inline bool is_prefix(const Outputs& few, const Outputs& many) {
    for (std::size_t i = 0; i < few.size(); ++i) {
        if (!std::equal(few[i].begin(), few[i].end(), many[i].begin())) return false;
    }
    return few.size() == many.size();
}

// Whether every element of a kept buffer is in the range that the engine inferred for it.
inline bool within_range(const Engine& engine, int number) {
    const Value& value = engine.value(number);
    const std::uint8_t* data = engine.buffer(number);
    for (std::int64_t i = 0; i < value.count(); ++i) {
        std::int64_t x = 0;
        switch (value.dtype) {
            case DType::u8: x = data[i]; break;
            case DType::u16: x = reinterpret_cast<const std::uint16_t*>(data)[i]; break;
            default: x = reinterpret_cast<const std::int32_t*>(data)[i];
        }
        if (x < value.lo || x > value.hi) return false;
    }
    return true;
}

}  // namespace fqvit::fuzz
