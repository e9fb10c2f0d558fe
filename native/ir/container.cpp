#include "ir/container.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "ir/fields.h"
#include "ir/sha256.h"

namespace fqvit {
namespace {

constexpr std::uint64_t MAX_HEADER = 100'000'000;  // bytes, as in the safetensors library

[[noreturn]] void fail_container(const std::string& problem) {
    throw BadProgramWithRemedy("not a readable .fqvit file (" + problem + "). It is damaged or truncated. Quantize again");
}

std::optional<DType> integer_type(std::string_view name) {
    constexpr std::pair<std::string_view, DType> TYPES[] = {{"U8", DType::u8},   {"I8", DType::i8},
                                                            {"U16", DType::u16}, {"I16", DType::i16},
                                                            {"I32", DType::i32}, {"I64", DType::i64}};
    for (const auto& [known, dtype] : TYPES) {
        if (name == known) return dtype;
    }
    return std::nullopt;
}

// One tensor as the header declares it. Unknown fields are ignored, as in the safetensors library.
struct Tensor {
    std::string name, dtype;
    Shape shape{};
    std::array<std::int64_t, 2> offsets{};
};

Tensor read_tensor(std::string_view name, Json json) {
    Tensor tensor{std::string(name), {}};
    const Where where{nullptr, name};
    const Bounds sizes{.lo = 0};
    require_type(where, json, Json::object);
    int found[3] = {};
    json.for_each_member([&](std::string_view field, Json value) {
        const Where here{&where, field};
        if (field == "dtype") read_field(value, here, {}, tensor.dtype), ++found[0];
        if (field == "shape") read_field(value, here, sizes, tensor.shape), ++found[1];
        if (field == "data_offsets") read_field(value, here, sizes, tensor.offsets), ++found[2];
    });
    for (const int times : found) {
        if (times != 1) fail_at(where, "expected dtype, shape and data_offsets, each once");
    }
    return tensor;
}

void read_metadata(Json json, std::map<std::string, std::string, std::less<>>& out) {
    if (json.is(Json::null)) return;
    read_field(json, Where{nullptr, "__metadata__"}, {}, out);
}

// Checks that the tensors cover `size` bytes without gaps and overlaps, each with the bytes that its shape needs.
void check_layout(std::vector<Tensor>& tensors, std::uint64_t size) {
    std::sort(tensors.begin(), tensors.end(), [](const Tensor& a, const Tensor& b) { return a.offsets < b.offsets; });
    std::int64_t end = 0;
    for (const Tensor& tensor : tensors) {
        const std::optional<DType> dtype = integer_type(tensor.dtype);
        if (!dtype.has_value()) {
            throw BadProgramWithRemedy("constant '" + tensor.name + "' is " + tensor.dtype +
                             ": only integers may be in a program. Quantize again");
        }
        if (tensor.offsets[0] != end || tensor.offsets[1] < end) fail_container("offsets of " + tensor.name);
        end = tensor.offsets[1];
        const std::int64_t bytes = end - tensor.offsets[0];
        std::int64_t count = size_of(*dtype);
        for (const std::int64_t axis : tensor.shape) {
            if (axis != 0 && count > MAX_INTEGER / axis) fail_container("shape of " + tensor.name);
            count *= axis;
        }
        if (count != bytes) fail_container("size of " + tensor.name);
    }
    if (static_cast<std::uint64_t>(end) != size) fail_container("size of the file");
}

}  // namespace

Container read_container(std::shared_ptr<Source> source) {
    std::uint8_t prefix[8];
    if (source->size() < sizeof prefix) fail_container("header too small");
    source->read(0, sizeof prefix, prefix);
    std::uint64_t length = 0;
    for (int i = 7; i >= 0; --i) length = length << 8 | prefix[i];
    if (length > MAX_HEADER || length > source->size() - sizeof prefix) fail_container("header too large");
    std::string text(static_cast<std::size_t>(length), '\0');
    source->read(sizeof prefix, text.size(), text.data());

    Container out{{}, Constants(source)};
    std::map<std::string, Tensor, std::less<>> named;  // of duplicates, the last one counts
    try {
        const JsonDocument document(text, "header");
        require_type({}, document.root(), Json::object);
        bool has_metadata = false;
        document.root().for_each_member([&](std::string_view name, Json value) {
            if (name != "__metadata__") {
                named.insert_or_assign(std::string(name), read_tensor(name, value));
                return;
            }
            require(!has_metadata, "__metadata__: given twice");
            has_metadata = true;
            read_metadata(value, out.metadata);
        });
    } catch (const BadProgram& error) {
        fail_container(error.what());
    }
    std::vector<Tensor> tensors;
    for (auto& [name, tensor] : named) tensors.push_back(std::move(tensor));
    const std::uint64_t start = sizeof prefix + length;
    check_layout(tensors, source->size() - start);
    for (Tensor& tensor : tensors) {
        const std::uint64_t offset = start + static_cast<std::uint64_t>(tensor.offsets[0]);
        out.constants.add(std::move(tensor.name), *integer_type(tensor.dtype), std::move(tensor.shape), offset);
    }
    return out;
}

const std::string& checked_json(const Container& container, const char* key) {
    const auto found = container.metadata.find(key);
    const auto fingerprint = container.metadata.find("fingerprint");
    require(found != container.metadata.end(), "no metadata of the key ", key);
    Sha256 digest;
    digest.update(found->second);
    for (const auto& [name, entry] : container.constants.entries()) {
        digest.update("\n"), digest.update(name), digest.update(" "), digest.update(name_of(entry.dtype));
        char before = ' ';
        for (const std::int64_t size : entry.shape) {
            digest.update(std::string_view(&before, 1)), digest.update(std::to_string(size));
            before = ',';
        }
        digest.update(entry.shape.empty() ? " \n" : "\n");
        container.constants.read_pieces(entry,
                                        [&](const std::uint8_t* data, std::size_t size) { digest.update(data, size); });
    }
    const bool same = fingerprint != container.metadata.end() && digest.hexadecimal() == fingerprint->second;
    if (!same) {
        throw BadProgramWithRemedy("the fingerprint does not match the contents. The file is damaged. Quantize again");
    }
    return found->second;
}

}  // namespace fqvit
