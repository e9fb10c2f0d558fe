// A structure-aware mutator of .fqvit files: changes values, names and lists of the JSON program, and types, shapes and
// elements of constants. Files with mutated bytes would rarely pass the JSON parser.
#pragma once

#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);

namespace fqvit::fuzz {

using Tree = nlohmann::ordered_json;

struct MutatedTensor {
    std::string name;
    Tree entry;  // dtype and shape
    std::string bytes;
};

class Mutator {
public:
    explicit Mutator(unsigned seed) : random_(seed) {}

    // Returns the mutated file, or an empty string if the input is not a container with a program.
    std::string mutate(const std::string& file) {
        if (file.size() < 8) return {};
        std::uint64_t length = 0;
        for (std::size_t i = 8; i-- > 0;) length = length << 8 | static_cast<std::uint8_t>(file[i]);
        if (length > file.size() - 8) return {};
        Tree header = Tree::parse(file.substr(8, length), nullptr, false);
        if (!header.is_object() || !header.contains("__metadata__")) return {};
        Tree metadata = header["__metadata__"];
        if (!metadata.is_object()) return {};
        const char* const key = metadata.contains("fqvit_detector") ? "fqvit_detector" : "fqvit";
        if (!metadata.contains(key) || !metadata[key].is_string()) return {};
        Tree program = Tree::parse(metadata[key].get<std::string>(), nullptr, false);
        std::vector<MutatedTensor> tensors;
        for (const auto& [name, entry] : header.items()) {
            if (name == "__metadata__") continue;
            const Tree &first = entry.at("data_offsets").at(0), &last = entry.at("data_offsets").at(1);
            if (!first.is_number_unsigned() || !last.is_number_unsigned()) return {};
            const auto begin = first.get<std::size_t>(), end = last.get<std::size_t>();
            if (begin > end || end > file.size() - 8 - length) return {};
            tensors.push_back({name, entry, file.substr(8 + length + begin, end - begin)});
        }
        for (std::size_t changes = 1 + below(3); changes > 0; --changes) {
            if (tensors.empty() || below(5) < 3) {
                change_program(program);
            } else {
                change_tensor(tensors, below(tensors.size()));
            }
        }
        metadata[key] = program.dump();
        metadata["fingerprint"] = std::string(64, '0');  // loader_fuzz.cpp replaces it by a valid one
        return packed(metadata, tensors);
    }

private:
    std::size_t below(std::size_t count) { return std::uniform_int_distribution<std::size_t>(0, count - 1)(random_); }

    static std::string packed(const Tree& metadata, const std::vector<MutatedTensor>& tensors) {
        Tree header{{"__metadata__", metadata}};
        std::string data;
        for (const MutatedTensor& tensor : tensors) {
            const std::size_t begin = data.size();
            data += tensor.bytes;
            header[tensor.name] = tensor.entry;
            header[tensor.name]["data_offsets"] = {begin, data.size()};
        }
        const std::string text = header.dump();
        std::string file;
        for (int i = 0; i < 8; ++i) file += static_cast<char>(text.size() >> (8 * i) & 255);
        return file + text + data;
    }

    static void collect(Tree& node, std::vector<Tree*>& nodes) {
        nodes.push_back(&node);
        if (!node.is_structured()) return;
        for (Tree& child : node) collect(child, nodes);
    }

    std::int64_t number(std::int64_t old) {
        constexpr std::int64_t ENDS[] = {0,  1,  -1,  2,   3,   7,     8,     15,      16,      17,         31,
                                         32, 62, 63,  127, 128, 255,   256,   65535,   65536,   1 << 20,    1 << 28,
                                         33, 64, 100, 129, 512, 4096,  8192,  1 << 29, 1 << 30, 2147483647, 2147483648,
                                         52, 53, 61,  5,   4,   40000, 32768, 1 << 24};
        const auto bits = static_cast<std::uint64_t>(old);  // unsigned, so that arithmetic wraps around
        switch (below(6)) {
            case 0: return static_cast<std::int64_t>(bits + 1);
            case 1: return static_cast<std::int64_t>(bits - 1);
            case 2: return static_cast<std::int64_t>(bits * 2);
            case 3: return std::int64_t{1} << below(63);
            default: return ENDS[below(std::size(ENDS))];
        }
    }

    // Changes one value, mostly inside the ops.
    void change_program(Tree& program) {
        const bool in_ops = program.is_object() && program.contains("ops") && below(8) > 0;
        std::vector<Tree*> nodes;
        collect(in_ops ? program["ops"] : program, nodes);
        Tree& node = *nodes[below(nodes.size())];
        const Tree& other = *nodes[below(nodes.size())];
        if (below(8) == 0) {
            node = Tree(other);
        } else if (node.is_number_integer()) {
            node = number(node.get<std::int64_t>());
        } else if (node.is_boolean()) {
            node = !node.get<bool>();
        } else if (node.is_string()) {
            for (int tries = 0; tries < 20; ++tries) {  // another name
                const Tree& name = *nodes[below(nodes.size())];
                if (name.is_string() && name != node) {
                    node = Tree(name);
                    return;
                }
            }
        } else if (node.is_array() && !node.empty()) {
            change_list(node);
        } else if (node.is_object() && !node.empty()) {
            change_object(node, other);
        }
    }

    void change_list(Tree& list) {
        const std::size_t i = below(list.size()), j = below(list.size());
        switch (below(4)) {
            case 0: list.erase(i); break;
            case 1: list.push_back(Tree(list[i])); break;
            case 2: std::swap(list[i], list[j]); break;
            default: list.insert(list.begin() + static_cast<std::ptrdiff_t>(i), Tree(list[j]));
        }
    }

    void change_object(Tree& object, const Tree& other) {
        constexpr const char* FIELDS[] = {"alpha",      "y_zero", "bits",   "group", "width", "codebooks",
                                          "weights_of", "select", "region", "index", "fill",  "zero",
                                          "skip",       "out",    "shape",  "levels"};
        if (below(3) == 0) {
            object.erase(std::next(object.begin(), static_cast<std::ptrdiff_t>(below(object.size()))).key());
        } else if (other.is_object() && !other.empty() && below(2) == 0) {
            const auto donor = std::next(other.begin(), static_cast<std::ptrdiff_t>(below(other.size())));
            const std::string key = donor.key();
            object[key] = Tree(donor.value());
        } else {
            object[FIELDS[below(std::size(FIELDS))]] = below(2) == 0 ? Tree(number(0)) : Tree(other);
        }
    }

    // Changes elements with the mutations of libFuzzer, or the type, shape or name of a tensor, or removes it.
    void change_tensor(std::vector<MutatedTensor>& tensors, std::size_t i) {
        MutatedTensor& tensor = tensors[i];
        switch (below(12)) {
            case 0: tensors.erase(tensors.begin() + static_cast<std::ptrdiff_t>(i)); return;
            case 1: std::swap(tensor.name, tensors[below(tensors.size())].name); return;
            case 2: tensor.entry["dtype"] = tensors[below(tensors.size())].entry["dtype"]; return;
            case 3: tensor.entry["shape"] = tensors[below(tensors.size())].entry["shape"]; return;
            case 4: tensor.entry["shape"] = Tree::array({tensor.bytes.size()}), tensor.entry["dtype"] = "U8"; return;
            case 5: tensor.bytes.assign(tensor.bytes.size(), static_cast<char>(below(2) == 0 ? 255 : 127)); return;
            default: break;
        }
        const std::size_t size = tensor.bytes.size();
        if (size == 0) return;
        std::vector<std::uint8_t> bytes(tensor.bytes.begin(), tensor.bytes.end());
        LLVMFuzzerMutate(bytes.data(), size, size);
        tensor.bytes.assign(bytes.begin(), bytes.end());
    }

    std::minstd_rand random_;
};

inline std::size_t mutate(std::uint8_t* data, std::size_t size, std::size_t max_size, unsigned seed) {
    std::string mutated;
    try {
        if (seed % 32 > 0) mutated = Mutator(seed).mutate({reinterpret_cast<const char*>(data), size});
    } catch (const nlohmann::json::exception&) {
        mutated.clear();  // an entry of the container has the wrong type, or a name is not UTF-8
    }
    if (mutated.empty() || mutated.size() > max_size) return LLVMFuzzerMutate(data, size, max_size);
    std::memcpy(data, mutated.data(), mutated.size());
    return mutated.size();
}

}  // namespace fqvit::fuzz
