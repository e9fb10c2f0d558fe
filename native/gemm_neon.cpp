#include "gemm.h"
namespace fqvit {
const Gemm* gemm_neon_dotprod() { return nullptr; }
}  // namespace fqvit
