#include "kernels.h"
namespace fqvit {
const Kernels* kernels_avx2() { return kernels_scalar(); }
}  // namespace fqvit
