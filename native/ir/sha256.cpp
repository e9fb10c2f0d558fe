#include "ir/sha256.h"

#include <algorithm>
#include <cstring>

namespace fqvit {
namespace {

Sha256Compress select_compress() {
    if (const Sha256Compress found = sha256_x86()) return found;
    if (const Sha256Compress found = sha256_neon()) return found;
    return sha256_scalar;
}

}  // namespace

// The first 32 bits of the fractional parts of the square roots of the first 8 primes.
Sha256::Sha256()
    : compress_(select_compress()),
      state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19} {}

void Sha256::update(const void* data, std::size_t size) {
    const auto* bytes = static_cast<const std::uint8_t*>(data);
    const std::size_t used = size_ % 64;
    size_ += size;
    if (used > 0) {
        const std::size_t count = std::min(size, 64 - used);
        std::copy_n(bytes, count, block_.begin() + static_cast<std::ptrdiff_t>(used));
        bytes += count, size -= count;
        if (used + count < 64) return;
        compress_(state_.data(), block_.data(), 1);
    }
    compress_(state_.data(), bytes, size / 64);
    std::copy_n(bytes + size / 64 * 64, size % 64, block_.begin());
}

std::string Sha256::hexadecimal() {
    const std::uint64_t bits = size_ * 8;
    const std::uint8_t end[64] = {0x80};
    const std::size_t used = size_ % 64;
    update(end, used < 56 ? 56 - used : 120 - used);
    std::uint8_t length[8];
    for (int i = 0; i < 8; ++i) length[i] = static_cast<std::uint8_t>(bits >> (56 - 8 * i));
    update(length, 8);
    std::string out;
    for (const std::uint32_t word : state_) {
        for (int shift = 28; shift >= 0; shift -= 4) out += "0123456789abcdef"[word >> shift & 15];
    }
    return out;
}

}  // namespace fqvit
