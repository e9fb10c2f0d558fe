// fqvit._native: what Python sees of the compiled part. Only bindings live here; src/fqvit/_native.pyi describes them.
// Kernels live beside this file, one header an op family (fixed.h, gemm_scalar, gemm_avx2, ...), never in it.
#include <nanobind/nanobind.h>

#include "cpu.h"

namespace nb = nanobind;

namespace {

nb::dict features() {
    const fqvit::CpuFeatures found = fqvit::cpu_features();
    nb::dict out;
    out["avx2"] = found.avx2;
    out["avx_vnni"] = found.avx_vnni;
    out["avx512_vnni"] = found.avx512_vnni;
    out["neon"] = found.neon;
    out["neon_dotprod"] = found.neon_dotprod;
    out["neon_i8mm"] = found.neon_i8mm;
    return out;
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "The compiled part of fqvit.";
    m.attr("version") = FQVIT_VERSION;
    m.def("cpu_features", &features, "Integer instruction sets that this machine can run, by name.");
}
