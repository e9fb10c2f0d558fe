#include "capi/text.h"

#include <cstdint>
#include <cstring>

namespace fqvit::capi {
namespace {

constexpr std::string_view REPLACEMENT = "\xEF\xBF\xBD";  // U+FFFD

struct Character {
    std::size_t length;  // in bytes
    char32_t code;
    bool valid;
};

// Reads the first character of a text that is not empty (table 3-7 of the Unicode standard). If it is invalid, the
// length is that of the longest prefix that could begin a valid character, and at least 1.
Character first_of(std::string_view text) noexcept {
    const auto byte = [&](std::size_t i) { return static_cast<std::uint8_t>(text[i]); };
    const std::uint8_t lead = byte(0);
    if (lead < 0x80) return {1, lead, true};
    const std::size_t length = lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
    if (length == 0) return {1, 0, false};
    char32_t code = lead & (0xFF >> (length + 1));
    for (std::size_t i = 1; i < length; ++i) {
        // The second byte is limited further, to exclude overlong forms, surrogates and codes above U+10FFFF.
        const int lo = i > 1 ? 0x80 : lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
        const int hi = i > 1 ? 0xBF : lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
        if (i >= text.size() || byte(i) < lo || byte(i) > hi) return {i, 0, false};
        code = code << 6 | (byte(i) & 0x3F);
    }
    return {length, code, true};
}

bool breaks_line(char32_t code) noexcept {
    return code < 0x20 || (code >= 0x7F && code < 0xA0) || code == 0x2028 || code == 0x2029;
}

}  // namespace

std::string valid_utf8(std::string_view text) {
    std::string out;
    while (!text.empty()) {
        const Character character = first_of(text);
        out += character.valid ? text.substr(0, character.length) : REPLACEMENT;
        text.remove_prefix(character.length);
    }
    return out;
}

std::size_t copy_line(std::string_view text, char* to, std::size_t capacity) noexcept {
    std::size_t length = 0;
    while (!text.empty()) {
        const Character character = first_of(text);
        std::string_view part = text.substr(0, character.length);
        if (!character.valid) part = REPLACEMENT;
        if (character.valid && breaks_line(character.code)) part = " ";
        if (length + part.size() >= capacity) break;
        std::memcpy(to + length, part.data(), part.size());
        length += part.size();
        text.remove_prefix(character.length);
    }
    to[length] = '\0';
    return length;
}

}  // namespace fqvit::capi
