// A parsed JSON text. The tokenizer is nlohmann-json's SAX parser; the document keeps 16 bytes per value, so that the
// memory for an untrusted text is at most a small multiple of its length.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fqvit {

// Integers of a file are in -2^62..2^62. Larger ones are kept as Json::big and accepted only where a float is expected.
constexpr std::int64_t MAX_INTEGER = std::int64_t{1} << 62;

class JsonDocument;

// One value of a document. The document must outlive it. Cheap to copy.
class Json {
public:
    enum Type : std::uint8_t { null, boolean, integer, big, number, text, array, object };

    Type type() const;
    bool is(Type wanted) const { return type() == wanted; }
    // Each accessor requires the matching type.
    bool as_boolean() const;
    std::int64_t as_integer() const;
    double as_number() const;  // also for integer and big
    std::string_view as_text() const;

    // Calls item(Json) for each element of an array.
    template <class Item>
    void for_each_item(const Item& item) const;
    // Calls member(std::string_view key, Json value) for each member of an object, duplicate keys included.
    template <class Member>
    void for_each_member(const Member& member) const;
    // Writes the value as JSON. Floats have 17 digits.
    std::string str() const;
    void append_to(std::string& out) const;

private:
    friend class JsonDocument;
    Json(const JsonDocument& document, std::uint32_t index) : document_(&document), index_(index) {}
    const JsonDocument* document_;
    std::uint32_t index_;
};

// Where JSON readers differ. A document must accept and reject the same texts as the reader that Python uses.
struct JsonRules {
    int max_depth;           // maximum nesting depth of arrays and objects
    bool minus_zero_is_int;  // whether -0 is an integer or a float
};
constexpr JsonRules PROGRAM_JSON{512, true};     // msgspec, which has no limit of its own
constexpr JsonRules CONTAINER_JSON{127, false};  // serde_json, which the safetensors library uses

class JsonDocument {
public:
    // Throws BadProgram with the message "<name> is not JSON" if the text is not exactly one JSON value, nests deeper
    // than allowed, or contains a number that no double can represent.
    JsonDocument(std::string_view json, const char* name, JsonRules rules = PROGRAM_JSON);
    JsonDocument(const JsonDocument&) = delete;
    JsonDocument& operator=(const JsonDocument&) = delete;
    Json root() const { return {*this, 0}; }

private:
    friend class Json;
    struct Parser;
    struct Node {
        union {
            std::int64_t integer;
            double number;
            std::size_t text;  // offset in texts_
        };
        std::uint32_t end = 0;  // array, object: index after the last node inside; text: length in bytes
        Json::Type type = Json::null;
    };
    // An array or object is followed by its nodes; in an object, keys and values alternate.
    std::vector<Node> nodes_;
    std::string texts_;
};

template <class Item>
void Json::for_each_item(const Item& item) const {
    const std::vector<JsonDocument::Node>& nodes = document_->nodes_;
    const std::uint32_t end = nodes[index_].end;
    for (std::uint32_t i = index_ + 1; i < end;) {
        item(Json(*document_, i));
        i = nodes[i].type >= array ? nodes[i].end : i + 1;
    }
}

template <class Member>
void Json::for_each_member(const Member& member) const {
    const std::vector<JsonDocument::Node>& nodes = document_->nodes_;
    const std::uint32_t end = nodes[index_].end;
    for (std::uint32_t i = index_ + 1; i < end;) {
        const Json key(*document_, i), value(*document_, i + 1);
        member(key.as_text(), value);
        i = nodes[i + 1].type >= array ? nodes[i + 1].end : i + 2;
    }
}

}  // namespace fqvit
