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
constexpr std::uint64_t LENGTH_BYTES = 8;          // size of the first field, the length of the header

// Reports a file that is not valid safetensors. In every .fqvit file, the opening brace of the header is at the same
// position.
[[noreturn]] void fail_container(Source& source) {
    char start = '\0';
    if (source.size() > LENGTH_BYTES) source.read(LENGTH_BYTES, 1, &start);
    throw BadProgramWithRemedy(start == '{'
                                   ? "damaged or truncated, expected a complete .fqvit file. Quantize again"
                                   : "not a .fqvit file, expected one written by `fqvit quantize`. Check the path");
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

// Checks that the tensors cover `size` bytes without gaps or overlaps, each with the bytes that its shape needs. The
// sizes of tensors that do not hold integers are not checked.
void check_layout(std::vector<Tensor>& tensors, std::uint64_t size) {
    std::sort(tensors.begin(), tensors.end(), [](const Tensor& a, const Tensor& b) { return a.offsets < b.offsets; });
    std::int64_t end = 0;
    for (const Tensor& tensor : tensors) {
        require(tensor.offsets[0] == end && tensor.offsets[1] >= end, "offsets of ", tensor.name);
        end = tensor.offsets[1];
        const std::optional<DType> dtype = integer_type(tensor.dtype);
        if (!dtype.has_value()) continue;
        std::int64_t bytes = size_of(*dtype);
        for (const std::int64_t axis : tensor.shape) {
            require(axis == 0 || bytes <= MAX_INTEGER / axis, "shape of ", tensor.name);
            bytes *= axis;
        }
        require(bytes == end - tensor.offsets[0], "size of ", tensor.name);
    }
    require(static_cast<std::uint64_t>(end) == size, "size of the file");
}

// Reads the header into the metadata of `out`; returns the tensors, in the order of their offsets.
std::vector<Tensor> read_tensors(const std::string& text, std::uint64_t data_bytes, Container& out) {
    const JsonDocument document(text, "header", CONTAINER_JSON);
    require_type({}, document.root(), Json::object);
    std::map<std::string, Tensor, std::less<>> named;  // of entries with the same name, the last one counts
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
    std::vector<Tensor> tensors;
    for (auto& [name, tensor] : named) tensors.push_back(std::move(tensor));
    check_layout(tensors, data_bytes);
    return tensors;
}

}  // namespace

Container read_container(std::shared_ptr<Source> source) {
    if (source->size() < LENGTH_BYTES) fail_container(*source);
    std::uint8_t prefix[LENGTH_BYTES];
    source->read(0, sizeof prefix, prefix);
    std::uint64_t length = 0;
    for (int i = 7; i >= 0; --i) length = length << 8 | prefix[i];
    if (length > MAX_HEADER || length > source->size() - LENGTH_BYTES) fail_container(*source);
    std::string text(static_cast<std::size_t>(length), '\0');
    source->read(LENGTH_BYTES, text.size(), text.data());

    Container out{{}, Constants(source)};
    std::vector<Tensor> tensors;
    const std::uint64_t start = LENGTH_BYTES + length;
    try {
        tensors = read_tensors(text, source->size() - start, out);
    } catch (const BadProgram&) {
        fail_container(*source);
    }
    // A file with the weights of a float model has no program in its metadata; the caller reports this.
    if (!out.metadata.contains(PROGRAM_KEY) && !out.metadata.contains(DETECTOR_KEY)) return out;
    for (Tensor& tensor : tensors) {
        const std::optional<DType> dtype = integer_type(tensor.dtype);
        if (!dtype.has_value()) {
            throw BadProgramWithRemedy("constant '" + tensor.name + "' is " + tensor.dtype +
                                       ": only integers may be in a program. Quantize again");
        }
        const std::uint64_t offset = start + static_cast<std::uint64_t>(tensor.offsets[0]);
        out.constants.add(std::move(tensor.name), *dtype, std::move(tensor.shape), offset);
    }
    return out;
}

std::string fingerprint_of(const Container& container, const std::string& json) {
    Sha256 digest;
    digest.update(json);
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
    return digest.hexadecimal();
}

const std::string& checked_json(const Container& container, const char* key) {
    const auto found = container.metadata.find(key);
    const auto fingerprint = container.metadata.find("fingerprint");
    require(found != container.metadata.end(), "no metadata with the key ", key);
    if (fingerprint == container.metadata.end() || fingerprint_of(container, found->second) != fingerprint->second) {
        throw BadProgramWithRemedy("the fingerprint does not match the contents. The file is damaged. Quantize again");
    }
    return found->second;
}

}  // namespace fqvit
