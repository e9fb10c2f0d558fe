// Reads JSON into structs, by name. A struct is described once, by a list of its fields:
//
//   template <>
//   struct Description<Term> {
//       static constexpr auto fields() { return std::tuple{required<&Term::x>("x"), optional<&Term::zero>("zero")}; }
//   };
//
// Types are strict, as in the Python package: no conversion between integers, floats, booleans and strings, except that
// an integer may stand for a float. Unknown and missing fields are errors; if a field occurs twice, the last counts.
// Every error throws BadProgram and names the field: "ops[41].shift: a string, expected an integer".
#pragma once

#include <array>
#include <concepts>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "core/value.h"
#include "ir/json.h"

namespace fqvit {

// The path of a value inside a document, for error messages.
struct Where {
    const Where* parent = nullptr;
    std::string_view name{};  // name of a member; empty for an element of a list
    std::int64_t index = -1;  // index of an element; -1 for a member
    std::string str() const;
};

// Limits of a field, all inclusive. They apply to the elements of lists, too.
struct Bounds {
    std::int64_t lo = -MAX_INTEGER, hi = MAX_INTEGER;
    double least = std::numeric_limits<double>::lowest(), most = std::numeric_limits<double>::max();
    std::size_t shortest = 0, longest = std::numeric_limits<std::size_t>::max();  // length of a list
};

// One field with its type erased, so that the code that reads objects is compiled only once.
struct FieldInfo {
    const char* name;
    Bounds bounds;
    bool required;
    void (*read)(Json json, const Where& where, const Bounds& bounds, void* object);
};

template <class T>
struct MemberOf;
template <class Struct, class T>
struct MemberOf<T Struct::*> {
    using Owner = Struct;
};

template <auto Member>
struct Field {
    const char* name;
    Bounds bounds;
    bool required;
    static constexpr auto MEMBER = Member;

    constexpr FieldInfo info() const {
        return {name, bounds, required, [](Json json, const Where& where, const Bounds& limits, void* object) {
                    read_field(json, where, limits,
                               static_cast<typename MemberOf<decltype(Member)>::Owner*>(object)->*Member);
                }};
    }
};

template <auto Member>
constexpr Field<Member> required(const char* name, Bounds bounds = {}) {
    return {name, bounds, true};
}
template <auto Member>
constexpr Field<Member> optional(const char* name, Bounds bounds = {}) {
    return {name, bounds, false};
}

// Specialized for each struct:
//   fields()              required: the list of fields
//   IS_ARRAY = true       optional: stored as an array of the fields; optional fields at the end may be missing
//   check(value, where)   optional: called after all fields have been read
template <class T>
struct Description;

// Specialized for each enumeration: the names of its values, in order.
template <class T>
struct Names;

[[noreturn]] void fail_at(const Where& where, const std::string& problem);
[[noreturn]] void fail_type(const Where& where, Json json, const char* expected);
void require_type(const Where& where, Json json, Json::Type type);
void require_length(const Where& where, std::size_t length, const Bounds& bounds);

void read_field(Json json, const Where& where, const Bounds& bounds, std::int64_t& out);
void read_field(Json json, const Where& where, const Bounds& bounds, double& out);
void read_field(Json json, const Where& where, const Bounds& bounds, bool& out);
void read_field(Json json, const Where& where, const Bounds& bounds, std::string& out);

template <class T>
concept Described = requires { Description<T>::fields(); };
template <class T>
concept Named = requires { Names<T>::names; };

// Declared before their definitions, because the overloads for nested types, such as lists of lists, call each other.
template <Named T>
void read_field(Json json, const Where& where, const Bounds& bounds, T& out);
template <Described T>
void read_field(Json json, const Where& where, const Bounds& bounds, T& out);
template <class T>
void read_field(Json json, const Where& where, const Bounds& bounds, std::optional<T>& out);
template <class T>
void read_field(Json json, const Where& where, const Bounds& bounds, std::vector<T>& out);
template <class T, std::size_t N>
void read_field(Json json, const Where& where, const Bounds& bounds, std::array<T, N>& out);
template <class T>
void read_field(Json json, const Where& where, const Bounds& bounds, std::map<std::string, T, std::less<>>& out);

template <Named T>
void read_field(Json json, const Where& where, const Bounds& bounds, T& out) {
    std::string name;
    read_field(json, where, bounds, name);
    int value = 0;
    for (const char* const known : Names<T>::names) {
        if (name == known) {
            out = static_cast<T>(value);
            return;
        }
        ++value;
    }
    fail_at(where, "unknown value '" + name + "'");
}

template <class T>
void read_field(Json json, const Where& where, const Bounds& bounds, std::optional<T>& out) {
    out.reset();
    if (!json.is(Json::null)) read_field(json, where, bounds, out.emplace());
}

template <class T>
void read_field(Json json, const Where& where, const Bounds& bounds, std::vector<T>& out) {
    require_type(where, json, Json::array);
    out.clear();
    json.for_each_item([&](Json item) {
        const Where here{&where, {}, static_cast<std::int64_t>(out.size())};
        read_field(item, here, bounds, out.emplace_back());
    });
    require_length(where, out.size(), bounds);
}

template <class T, std::size_t N>
void read_field(Json json, const Where& where, const Bounds& bounds, std::array<T, N>& out) {
    require_type(where, json, Json::array);
    std::size_t count = 0;
    json.for_each_item([&](Json item) {
        const Where here{&where, {}, static_cast<std::int64_t>(count)};
        if (count < N) read_field(item, here, bounds, out[count]);
        ++count;
    });
    if (count != N) fail_at(where, std::to_string(count) + " elements, expected " + std::to_string(N));
}

template <class T>
void read_field(Json json, const Where& where, const Bounds& bounds, std::map<std::string, T, std::less<>>& out) {
    require_type(where, json, Json::object);
    out.clear();
    json.for_each_member([&](std::string_view key, Json value) {
        T one{};
        read_field(value, Where{&where, key}, bounds, one);
        out.insert_or_assign(std::string(key), std::move(one));
    });
}

template <Described T>
std::span<const FieldInfo> fields_of() {
    static constexpr auto FIELDS =
        std::apply([](const auto&... fields) { return std::array{fields.info()...}; }, Description<T>::fields());
    return FIELDS;
}

// tag: a member that is not a field, because the caller has read it already; empty for none.
void read_object(Json json, const Where& where, std::span<const FieldInfo> fields, void* out,
                 std::string_view tag = {});
void read_array_like(Json json, const Where& where, std::span<const FieldInfo> fields, void* out);

template <Described T>
void read_field(Json json, const Where& where, const Bounds&, T& out) {
    if constexpr (requires { Description<T>::IS_ARRAY; }) {
        read_array_like(json, where, fields_of<T>(), &out);
    } else {
        read_object(json, where, fields_of<T>(), &out);
    }
    if constexpr (requires { Description<T>::check(out, where); }) Description<T>::check(out, where);
}

}  // namespace fqvit
