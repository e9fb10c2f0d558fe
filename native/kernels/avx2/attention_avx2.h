// One head of attention with AVX2. attention_avx2.cpp describes the algorithm.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"

namespace fqvit {

void attention_avx2(const Attention& head, const std::uint8_t* q, const std::uint8_t* k, const std::uint8_t* v,
                    const std::int32_t* bias, const std::uint8_t* region, std::uint8_t* y, std::uint8_t* scratch);
// Returns the bytes of scratch memory, or 0 if attention_avx2 does not support the head: too many tokens or channels,
// or a multiplier whose shift cannot be raised to 32.
std::size_t attention_scratch_avx2(const Attention& head);

}  // namespace fqvit
