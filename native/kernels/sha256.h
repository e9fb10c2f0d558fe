// The compression function of SHA-256 (FIPS 180-4), one per instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fqvit {

// Updates the state with `blocks` blocks of 64 bytes.
using Sha256Compress = void (*)(std::uint32_t state[8], const std::uint8_t* data, std::size_t blocks);

extern const std::uint32_t SHA256_ROUND_CONSTANTS[64];
void sha256_scalar(std::uint32_t state[8], const std::uint8_t* data, std::size_t blocks);
// Null if this build does not contain the instructions or this CPU lacks them.
Sha256Compress sha256_x86();
Sha256Compress sha256_neon();

}  // namespace fqvit
