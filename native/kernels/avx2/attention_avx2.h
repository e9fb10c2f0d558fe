// One head of attention in the first caches: scores, softmax and attention times V, six rows at a time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"

namespace fqvit {

void attend_avx2(const Attention& head, const std::uint8_t* q, const std::uint8_t* k, const std::uint8_t* v,
                 const std::int32_t* bias, const std::uint8_t* region, std::uint8_t* y, std::uint8_t* scratch);
// 0 where a head is too long or wide, or rounds by shifts that the vector form does not have.
std::size_t attend_scratch_avx2(const Attention& head);

}  // namespace fqvit
