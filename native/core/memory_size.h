// Converts 64-bit sizes to std::size_t, which has 32 bits in WebAssembly.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

namespace fqvit {

// Returns a number of bytes or elements as a size; throws std::bad_alloc if the address space is smaller (WebAssembly).
constexpr std::size_t memory_size(std::uint64_t n) {
    if constexpr (sizeof(std::size_t) < sizeof n) {
        if (n > SIZE_MAX / 2) throw std::bad_alloc();
    }
    return static_cast<std::size_t>(n);
}
constexpr std::size_t memory_size(std::int64_t n) { return memory_size(static_cast<std::uint64_t>(n)); }

}  // namespace fqvit
