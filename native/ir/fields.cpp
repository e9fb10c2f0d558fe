#include "ir/fields.h"

namespace fqvit {
namespace {

const char* name_of(Json::Type type) {
    constexpr const char* NAMES[] = {"null",     "a boolean", "an integer", "an integer beyond 2^62",
                                     "a number", "a string",  "a list",     "an object"};
    return NAMES[type];
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

}  // namespace fqvit
