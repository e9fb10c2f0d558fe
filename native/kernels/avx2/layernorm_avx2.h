// LayerNorm with AVX2.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"

namespace fqvit {

void layernorm_avx2(const Norm& norm, const void* x, void* y, std::int64_t rows);

}  // namespace fqvit
