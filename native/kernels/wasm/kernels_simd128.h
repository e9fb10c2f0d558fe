// The SIMD128 kernels that the table in kernels_simd128.cpp uses and other files define. WebAssembly only.
#pragma once

#include "kernels/kernels.h"

namespace fqvit {

void layernorm_simd128(const Norm& norm, const void* x, void* y, std::int64_t rows);
void attention_simd128(const Attention&, const std::uint8_t* q, const std::uint8_t* k, const std::uint8_t* v,
                       const std::int32_t* bias, const std::uint8_t* region, std::uint8_t* y, std::uint8_t* scratch);
std::size_t attention_scratch_simd128(const Attention&);

}  // namespace fqvit
