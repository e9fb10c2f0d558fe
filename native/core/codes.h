// Loads and stores for scalar code: quantized codes whose type, u8 or u16, is known only at run time.
#pragma once

#include <cstdint>

namespace fqvit {

inline std::int64_t load_code(const void* x, bool wide, std::int64_t i) {
    return wide ? static_cast<const std::uint16_t*>(x)[i] : static_cast<const std::uint8_t*>(x)[i];
}

inline void store_code(void* y, bool wide, std::int64_t i, std::int64_t code) {
    if (wide) {
        static_cast<std::uint16_t*>(y)[i] = static_cast<std::uint16_t>(code);
    } else {
        static_cast<std::uint8_t*>(y)[i] = static_cast<std::uint8_t>(code);
    }
}

// Read-only codes with an index operator. wide: u16, else u8.
struct Codes {
    const void* data;
    bool wide;
    std::int64_t operator[](std::int64_t i) const { return load_code(data, wide, i); }
    const void* at(std::int64_t i) const { return static_cast<const std::uint8_t*>(data) + (wide ? 2 * i : i); }
};

}  // namespace fqvit
