#include "gemm.h"
namespace fqvit {
const Gemm* gemm_avx_vnni() { return nullptr; }
const Gemm* gemm_avx512_vnni() { return nullptr; }
}  // namespace fqvit
