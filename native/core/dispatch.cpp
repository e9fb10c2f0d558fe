#include "core/dispatch.h"

#include <vector>

#include "core/cpu.h"
#include "core/engine.h"

namespace fqvit {
namespace {

// Cascade Lake and Cooper Lake have VNNI, but not VBMI.
KernelSet avx512_vnni(const CpuFeatures& cpu) {
    if (!cpu.avx512_vnni) return {"avx512_vnni", nullptr, nullptr};
    if (cpu.avx512_vbmi) return {"avx512_vnni", gemm_avx512_vnni(), kernels_avx512()};
    return {"avx512_vnni", gemm_avx512_vnni_prefetch(), kernels_avx512bw()};
}

// Returns the kernels that this build contains and this CPU supports, fastest first.
std::vector<KernelSet> available_kernels() {
    const CpuFeatures cpu = cpu_features();
    const Kernels* avx2 = cpu.avx2 ? kernels_avx2() : nullptr;
    const KernelSet all[] = {
        avx512_vnni(cpu),
        {"avx_vnni", cpu.avx_vnni ? gemm_avx_vnni() : nullptr, avx2},
        {"avx2", cpu.avx2 ? gemm_avx2() : nullptr, avx2},
        {"neon_i8mm", cpu.neon_i8mm && cpu.neon_dotprod ? gemm_neon_i8mm() : nullptr, kernels_neon_dotprod()},
        {"neon_dotprod", cpu.neon_dotprod ? gemm_neon_dotprod() : nullptr, kernels_neon_dotprod()},
        {"neon", cpu.neon ? gemm_neon() : nullptr, kernels_neon()},
#if defined(__wasm__)
        {"relaxed_simd", gemm_relaxed_simd(), kernels_simd128()},
#endif
        {"simd128", gemm_simd128(), kernels_simd128()},
        {"scalar", gemm_scalar(), kernels_scalar()},
    };
    std::vector<KernelSet> found;
    for (const KernelSet& set : all) {
        if (set.gemm != nullptr && set.kernels != nullptr) found.push_back(set);
    }
    return found;
}

}  // namespace

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
    for (const KernelSet& set : available_kernels()) names.emplace_back(set.name);
    return names;
}

KernelSet select_kernels(const std::string& name) {
    std::string known;
    for (const KernelSet& set : available_kernels()) {
        if (name.empty() || name == set.name) return set;
        known += (known.empty() ? "" : ", ") + std::string(set.name);
    }
    fail({"instruction set ", name, ": not in this build or not on this CPU, expected one of ", known});
}

}  // namespace fqvit
