#include "ir/json.h"

#include <cstdio>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/value.h"

namespace fqvit {

using JsonInput = nlohmann::detail::iterator_input_adapter<std::string_view::const_iterator>;

// Receives the tokens. Each function returns whether to go on.
struct JsonDocument::Parser : nlohmann::json_sax<nlohmann::json> {
    Parser(JsonDocument& document, JsonRules rules) : document(document), rules(rules) {}

    bool add(Json::Type type) {
        if (document.nodes_.size() >= std::numeric_limits<std::uint32_t>::max()) return false;
        document.nodes_.emplace_back().type = type;
        return true;
    }
    Node& last() { return document.nodes_.back(); }
    bool add_integer(std::int64_t value) {
        if (!add(Json::integer)) return false;
        last().integer = value;
        return true;
    }
    bool add_number(Json::Type type, double value) {
        if (!add(type)) return false;
        last().number = value;
        return true;
    }
    bool add_text(const std::string& value) {
        if (value.size() > std::numeric_limits<std::uint32_t>::max() || !add(Json::text)) return false;
        last().text = document.texts_.size();
        last().end = static_cast<std::uint32_t>(value.size());
        document.texts_ += value;
        return true;
    }
    bool open(Json::Type type) {
        if (open_nodes.size() >= static_cast<std::size_t>(rules.max_depth) || !add(type)) return false;
        open_nodes.push_back(document.nodes_.size() - 1);
        return true;
    }
    bool close() {
        document.nodes_[open_nodes.back()].end = static_cast<std::uint32_t>(document.nodes_.size());
        open_nodes.pop_back();
        return true;
    }

    bool null() override { return add(Json::null); }
    bool boolean(bool value) override {
        if (!add(Json::boolean)) return false;
        last().integer = value ? 1 : 0;
        return true;
    }
    // Called for numbers with a minus sign only.
    bool number_integer(number_integer_t value) override {
        if (value == 0 && !rules.minus_zero_is_int) return add_number(Json::number, -0.0);
        const bool fits = value >= -MAX_INTEGER && value <= MAX_INTEGER;
        return fits ? add_integer(value) : add_number(Json::big, static_cast<double>(value));
    }
    bool number_unsigned(number_unsigned_t value) override {
        const bool fits = value <= static_cast<number_unsigned_t>(MAX_INTEGER);
        return fits ? add_integer(static_cast<std::int64_t>(value)) : add_number(Json::big, static_cast<double>(value));
    }
    // An integer of more than 64 bits arrives here as well; its text has neither a point nor an exponent.
    bool number_float(number_float_t value, const string_t& digits) override {
        const bool whole = digits.find_first_of(".eE") == string_t::npos;
        return add_number(whole ? Json::big : Json::number, value);
    }
    bool string(string_t& value) override { return add_text(value); }
    bool key(string_t& value) override { return add_text(value); }
    bool start_object(std::size_t) override { return open(Json::object); }
    bool end_object() override { return close(); }
    bool start_array(std::size_t) override { return open(Json::array); }
    bool end_array() override { return close(); }
    bool binary(binary_t&) override { return false; }
    bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception&) override { return false; }

    JsonDocument& document;
    const JsonRules rules;
    std::vector<std::size_t> open_nodes;
};

JsonDocument::JsonDocument(std::string_view json, const char* name, JsonRules rules) {
    Parser parser(*this, rules);
    // The tokenizer would skip a byte order mark and stop at a NUL byte.
    const bool plain = !json.starts_with("\xEF\xBB\xBF") && json.find('\0') == std::string_view::npos;
    // nlohmann::json::sax_parse would also compile the readers of binary formats. `detail` is not a public interface:
    // check this when nlohmann-json is updated.
    nlohmann::detail::parser<nlohmann::json, JsonInput> tokens(JsonInput(json.begin(), json.end()));
    const bool parsed = plain && tokens.sax_parse(&parser);
    require(parsed, name, " is not JSON");
}

Json::Type Json::type() const { return document_->nodes_[index_].type; }
bool Json::as_boolean() const { return document_->nodes_[index_].integer != 0; }
std::int64_t Json::as_integer() const { return document_->nodes_[index_].integer; }
double Json::as_number() const {
    const JsonDocument::Node& node = document_->nodes_[index_];
    return node.type == integer ? static_cast<double>(node.integer) : node.number;
}
std::string_view Json::as_text() const {
    const JsonDocument::Node& node = document_->nodes_[index_];
    return std::string_view(document_->texts_).substr(node.text, node.end);
}

namespace {

void append_quoted(std::string& to, std::string_view text) {
    to += '"';
    for (const char letter : text) {
        if (letter == '"' || letter == '\\') {
            (to += '\\') += letter;
        } else if (static_cast<unsigned char>(letter) < 0x20) {
            char escaped[8];
            std::snprintf(escaped, sizeof escaped, "\\u%04x", static_cast<unsigned>(letter));
            to += escaped;
        } else {
            to += letter;
        }
    }
    to += '"';
}

}  // namespace

std::string Json::str() const {
    std::string out;
    append_to(out);
    return out;
}

void Json::append_to(std::string& out) const {
    switch (type()) {
        case null: out += "null"; break;
        case boolean: out += as_boolean() ? "true" : "false"; break;
        case integer: out += std::to_string(as_integer()); break;
        case big:
        case number: {
            char digits[40];
            std::snprintf(digits, sizeof digits, "%.17g", as_number());
            out += digits;
            break;
        }
        case text: append_quoted(out, as_text()); break;
        case array: {
            char before = '[';
            for_each_item([&](Json item) {
                out += std::exchange(before, ',');
                item.append_to(out);
            });
            out += before == '[' ? "[]" : "]";
            break;
        }
        case object: {
            char before = '{';
            for_each_member([&](std::string_view key, Json value) {
                out += std::exchange(before, ',');
                append_quoted(out, key);
                out += ':';
                value.append_to(out);
            });
            out += before == '{' ? "{}" : "}";
            break;
        }
    }
}

}  // namespace fqvit
