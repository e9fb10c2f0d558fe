#include "ir/fields.h"

#include <algorithm>

namespace fqvit {
namespace {

const char* name_of(Json::Type type) {
    constexpr const char* NAMES[] = {"null",     "a boolean", "an integer", "an integer beyond 2^62",
                                     "a number", "a string",  "a list",     "an object"};
    return NAMES[type];
}

void require_fields(const Where& where, std::span<const FieldInfo> fields, const std::vector<bool>& found) {
    for (std::size_t i = 0; i < fields.size(); ++i) {
        if (!found[i] && fields[i].required) fail_at(where, std::string("missing field '") + fields[i].name + "'");
    }
}

}  // namespace

std::string Where::str() const {
    const std::string before = parent == nullptr ? "" : parent->str();
    if (index >= 0) return before + "[" + std::to_string(index) + "]";
    if (name.empty()) return before;
    return (before.empty() ? "" : before + ".") + std::string(name);
}

void fail_at(const Where& where, const std::string& problem) {
    const std::string path = where.str();
    throw BadProgram((path.empty() ? "program" : path) + ": " + problem);
}

void fail_type(const Where& where, Json json, const char* expected) {
    fail_at(where, std::string(name_of(json.type())) + ", expected " + expected);
}

void require_type(const Where& where, Json json, Json::Type type) {
    if (!json.is(type)) fail_type(where, json, name_of(type));
}

void require_length(const Where& where, std::size_t length, const Bounds& bounds) {
    if (length < bounds.shortest || length > bounds.longest) {
        const std::string least = std::to_string(bounds.shortest), most = std::to_string(bounds.longest);
        const bool short_one = length < bounds.shortest;
        fail_at(where,
                std::to_string(length) + " elements, expected at " + (short_one ? "least " + least : "most " + most));
    }
}

void read_field(Json json, const Where& where, const Bounds& bounds, std::int64_t& out) {
    require_type(where, json, Json::integer);
    out = json.as_integer();
    if (out < bounds.lo || out > bounds.hi) {
        fail_at(where,
                std::to_string(out) + ", expected " + std::to_string(bounds.lo) + " to " + std::to_string(bounds.hi));
    }
}

void read_field(Json json, const Where& where, const Bounds& bounds, double& out) {
    if (!json.is(Json::number) && !json.is(Json::big)) require_type(where, json, Json::integer);
    out = json.as_number();
    if (!(out >= bounds.least && out <= bounds.most)) fail_at(where, json.str() + " is out of range");
}

void read_field(Json json, const Where& where, const Bounds&, bool& out) {
    require_type(where, json, Json::boolean);
    out = json.as_boolean();
}

void read_field(Json json, const Where& where, const Bounds&, std::string& out) {
    require_type(where, json, Json::text);
    out = json.as_text();
}

void read_object(Json json, const Where& where, std::span<const FieldInfo> fields, void* out, std::string_view tag) {
    require_type(where, json, Json::object);
    std::vector<bool> found(fields.size());
    json.for_each_member([&](std::string_view name, Json value) {
        if (!tag.empty() && name == tag) return;
        const auto field =
            std::find_if(fields.begin(), fields.end(), [&](const FieldInfo& one) { return name == one.name; });
        if (field == fields.end()) fail_at(where, "unknown field '" + std::string(name) + "'");
        field->read(value, Where{&where, name}, field->bounds, out);
        found[static_cast<std::size_t>(field - fields.begin())] = true;
    });
    require_fields(where, fields, found);
}

void read_array_like(Json json, const Where& where, std::span<const FieldInfo> fields, void* out) {
    require_type(where, json, Json::array);
    std::vector<bool> found(fields.size());
    std::size_t count = 0;
    json.for_each_item([&](Json item) {
        if (count >= fields.size()) fail_at(where, "expected at most " + std::to_string(fields.size()) + " elements");
        fields[count].read(item, Where{&where, {}, static_cast<std::int64_t>(count)}, fields[count].bounds, out);
        found[count++] = true;
    });
    require_fields(where, fields, found);
}

}  // namespace fqvit
