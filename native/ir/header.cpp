#include "ir/header.h"

#include <cmath>

namespace fqvit {

Shape Header::input_shape() const {
    if (input.has_value()) return {input->shape.begin(), input->shape.end()};
    return {preprocess.height, preprocess.width, preprocess.channels};
}

std::vector<Output> Header::outputs() const {
    std::vector<Output> out{output};
    out.insert(out.end(), others.begin(), others.end());
    return out;
}

void Description<Preprocess>::check(const Preprocess& preprocess, const Where& where) {
    const auto channels = static_cast<std::size_t>(preprocess.channels);
    if (preprocess.channels != 1 && preprocess.channels != 3) {
        fail_at(where, std::to_string(preprocess.channels) + " channels, expected 1 or 3");
    }
    if (preprocess.mean.size() != channels || preprocess.std.size() != channels) {
        fail_at(where, "mean and std need " + std::to_string(channels) + " values");
    }
    for (const double std : preprocess.std) {
        if (!(std > 0)) fail_at(where, "std must be positive");
    }
}

void Description<Output>::check(const Output& output, const Where& where) {
    constexpr std::string_view LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789@:._+-";
    if (output.name.size() > 64 || output.name.find_first_not_of(LETTERS) != std::string::npos) {
        fail_at(Where{&where, "name"}, "expected at most 64 letters, digits and @:._+-");
    }
}

void read_field(Json json, const Where& where, const Bounds& bounds, Scale& out) {
    read_field(json, where, bounds, out.value);
    if (!(out.value > 0 && out.value < 1e30)) fail_at(where, json.str() + ", expected above 0 and below 1e30");
}

void read_field(Json json, const Where& where, const Bounds& bounds, SiteZero& out) {
    out = SiteZero{};
    if (json.is(Json::text)) {
        read_field(json, where, bounds, out.constant);
    } else {
        read_field(json, where, bounds, out.values);
    }
}

void read_field(Json json, const Where& where, const Bounds&, RawObject& out) {
    require_type(where, json, Json::object);
    out.text = json.str();
}

void check_version(Json json) {
    require(json.is(Json::object), "the program is not JSON");
    std::string version = "none";
    json.for_each_member([&](std::string_view name, Json value) {
        if (name == "version") version = value.str();
    });
    if (version != "1" && version != "2") {
        throw BadProgramWithRemedy("format version " + version +
                                   ", this fqvit reads 1 to 2. Install a newer fqvit, or quantize again");
    }
}

void check_fields(std::int64_t version, const Header& header) {
    if (version >= 2) return;
    for (const OpFields& op : header.ops) {
        const auto* linear = std::get_if<LinearFields>(&op);
        require(linear == nullptr || (linear->width == 0 && linear->codebooks == 0), "format version ", version,
                ", but linear ops with a width or codebooks need 2");
    }
}

Header read_header(const std::string& json) {
    const JsonDocument document(json, "the program");
    check_version(document.root());
    Header header;
    read_field(document.root(), Where{}, Bounds{}, header);
    check_fields(header.version, header);
    return header;
}

}  // namespace fqvit
