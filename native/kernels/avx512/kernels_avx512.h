// The kernels of this folder that kernels_avx512.cpp lists in its table. avx512.h explains the namespaces.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/avx512/avx512.h"
#include "kernels/kernels.h"

namespace fqvit {
namespace FQVIT_AVX512_NAMESPACE {

void epilogue(const Epilogue& e, const Tile& tile, void* y);
void attention(const Attention& head, const std::uint8_t* q, const std::uint8_t* k, const std::uint8_t* v,
               const std::int32_t* bias, const std::uint8_t* region, std::uint8_t* y, std::uint8_t* scratch);
std::size_t attention_scratch(const Attention& head);

// Kernels for parameters that this folder does not support.
inline const Kernels* fallback() {
#ifdef FQVIT_AVX512_SHIM
    return kernels_scalar();
#else
    return kernels_avx2();
#endif
}

}  // namespace FQVIT_AVX512_NAMESPACE

namespace FQVIT_AVX512_SHARED {

void layernorm(const Norm& norm, const void* x, void* y, std::int64_t rows);

}  // namespace FQVIT_AVX512_SHARED

// The tables of kernels_avx512() and kernels_avx512bw(), but with the operations of avx512_shim.h. For tests, which
// compile this folder with FQVIT_AVX512_SHIM.
const Kernels* kernels_avx512_shim();
const Kernels* kernels_avx512bw_shim();

}  // namespace fqvit
