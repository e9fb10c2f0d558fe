// Reads JSON into structs, by name. A struct is described once, by a list of its fields:
//
//   template <>
//   struct Description<Term> {
//       static constexpr auto fields() { return std::tuple{required("x", &Term::x), optional("zero", &Term::zero)}; }
//   };
//
// Types are strict, as in the Python package: no conversion between integers, floats, booleans and strings, except that
// an integer may stand for a float. Unknown and missing fields are errors; of duplicates, the last one counts. Every
// error throws BadProgram and names the field: "ops[41].shift: a string, expected an integer".
#pragma once

#include <array>
#include <concepts>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "core/value.h"
#include "ir/json.h"

namespace fqvit {

// The path of a value inside a document, for error messages.
struct Where {
    const Where* parent = nullptr;
    std::string_view name{};  // of a member; empty for an element
    std::int64_t index = -1;  // of an element
    std::string str() const;
};

// Limits of a field, all inclusive. They apply to the elements of lists, too.
struct Bounds {
    std::int64_t lo = -MAX_INTEGER, hi = MAX_INTEGER;
    double least = std::numeric_limits<double>::lowest(), most = std::numeric_limits<double>::max();
    std::size_t shortest = 0, longest = std::numeric_limits<std::size_t>::max();  // length of a list
};

template <class Struct, class T>
struct Field {
    const char* name;
    T Struct::* member;
    Bounds bounds;
    bool required;
};

template <class Struct, class T>
constexpr Field<Struct, T> required(const char* name, T Struct::* member, Bounds bounds = {}) {
    return {name, member, bounds, true};
}
template <class Struct, class T>
constexpr Field<Struct, T> optional(const char* name, T Struct::* member, Bounds bounds = {}) {
    return {name, member, bounds, false};
}

// Specialized for each struct: fields(), and optionally `IS_ARRAY = true` for structs that are stored as an array of
// their fields, whose optional fields at the end may be missing.
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

// Declared before their definitions, because lists of lists need each other.
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

// Reads one member of an object; returns whether the struct has a field of this name.
template <class T>
bool read_member(std::string_view name, Json value, const Where& where, T& out, std::vector<bool>& found) {
    std::size_t i = 0;
    return std::apply(
        [&](const auto&... fields) {
            const auto read_if_named = [&](const auto& field) {
                const std::size_t at = i++;
                if (name != field.name) return false;
                read_field(value, Where{&where, name}, field.bounds, out.*(field.member));
                found[at] = true;
                return true;
            };
            return (read_if_named(fields) || ...);
        },
        Description<T>::fields());
}

template <class T>
void require_fields(const Where& where, const std::vector<bool>& found) {
    std::size_t i = 0;
    std::apply(
        [&](const auto&... fields) {
            const auto check = [&](const auto& field) {
                if (!found[i++] && field.required) fail_at(where, std::string("missing field '") + field.name + "'");
            };
            (check(fields), ...);
        },
        Description<T>::fields());
}

// tag: a member that is not a field, because the caller has read it already; empty for none.
template <Described T>
void read_object(Json json, const Where& where, T& out, std::string_view tag = {}) {
    require_type(where, json, Json::object);
    std::vector<bool> found(std::tuple_size_v<decltype(Description<T>::fields())>);
    json.for_each_member([&](std::string_view name, Json value) {
        if (!tag.empty() && name == tag) return;
        if (!read_member(name, value, where, out, found)) {
            fail_at(where, "unknown field '" + std::string(name) + "'");
        }
    });
    require_fields<T>(where, found);
}

template <Described T>
void read_array_like(Json json, const Where& where, T& out) {
    require_type(where, json, Json::array);
    constexpr std::size_t FIELDS = std::tuple_size_v<decltype(Description<T>::fields())>;
    std::vector<bool> found(FIELDS);
    std::size_t count = 0;
    json.for_each_item([&](Json item) {
        if (count >= FIELDS) fail_at(where, "expected at most " + std::to_string(FIELDS) + " elements");
        std::size_t i = 0;
        std::apply(
            [&](const auto&... fields) {
                const auto read_if_here = [&](const auto& field) {
                    if (i++ != count) return;
                    const Where here{&where, {}, static_cast<std::int64_t>(count)};
                    read_field(item, here, field.bounds, out.*(field.member));
                };
                (read_if_here(fields), ...);
            },
            Description<T>::fields());
        found[count++] = true;
    });
    require_fields<T>(where, found);
}

template <Described T>
void read_field(Json json, const Where& where, const Bounds&, T& out) {
    if constexpr (requires { Description<T>::IS_ARRAY; }) {
        read_array_like(json, where, out);
    } else {
        read_object(json, where, out);
    }
    if constexpr (requires { Description<T>::check(out, where); }) Description<T>::check(out, where);
}

}  // namespace fqvit
