// SHA-256, the fingerprint of a program, which detects damage. Implemented here because the standard library has no
// hash with a defined result, and a cryptography library would be the engine's only dependency at run time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "kernels/sha256.h"

namespace fqvit {

class Sha256 {
public:
    Sha256();
    void update(const void* data, std::size_t size);
    void update(std::string_view text) { update(text.data(), text.size()); }
    std::string hexadecimal();  // ends the computation

private:
    Sha256Compress compress_;
    std::array<std::uint32_t, 8> state_;
    std::array<std::uint8_t, 64> block_{};
    std::uint64_t size_ = 0;
};

}  // namespace fqvit
