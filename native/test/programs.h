// Helpers of tests that load and run .fqvit files.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "core/model.h"

namespace fqvit::test {

using Bytes = std::vector<std::uint8_t>;

inline Bytes read_file(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Loads a file without a limit on its buffers.
inline std::unique_ptr<Model> load(const Bytes& file, const std::string& isa, int threads, bool keep) {
    return std::make_unique<Model>(borrow_memory(file.data(), file.size()),
                                   EngineOptions{.instruction_set = isa,
                                                 .threads = threads,
                                                 .keep_buffers = keep,
                                                 .max_run_bytes = std::numeric_limits<std::int64_t>::max()});
}

// Returns the numbers of the buffers that ops write.
inline std::vector<int> buffers_of(const Model& model) {
    std::vector<int> numbers;
    for (const OpFields& op : read_header(model.json()).ops) numbers.push_back(model.engine().find(output_of(op)));
    return numbers;
}

// Returns pixels according to style % 4: random, all 0, all 255, or a random mix of 0 and 255.
inline Bytes image_of(const Shape& shape, std::int64_t style, std::uint32_t seed) {
    Bytes pixels(static_cast<std::size_t>(elements(shape)));
    for (std::uint8_t& pixel : pixels) {
        seed = static_cast<std::uint32_t>((std::uint64_t{seed} * 1664525 + 1013904223) & 0xffffffff);
        const auto random = static_cast<std::uint8_t>(seed >> 24);
        pixel = style % 4 == 1 ? 0 : style % 4 == 2 ? 255 : style % 4 == 3 ? (random & 1 ? 255 : 0) : random;
    }
    return pixels;
}

// One array per output, each with all images.
using Outputs = std::vector<Bytes>;

inline Outputs run(Engine& engine, const Bytes& images, std::int64_t count) {
    Outputs found;
    std::vector<std::uint8_t*> ys;
    for (const int number : engine.outputs()) {
        found.emplace_back(static_cast<std::size_t>(engine.value(number).bytes() * count));
    }
    for (Bytes& y : found) ys.push_back(y.data());
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

}  // namespace fqvit::test
