// Detects at run time which integer instructions the CPU and the operating system support, so that one build serves
// every machine. Covers x86-64 (GCC, Clang) and AArch64 (Linux, macOS, Windows); elsewhere every feature is false.
#pragma once

#include <cstdint>

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__aarch64__) && defined(_WIN32)
extern "C" __declspec(dllimport) int __stdcall IsProcessorFeaturePresent(unsigned long feature);  // from windows.h
#endif

namespace fqvit {

struct CpuFeatures {
    bool avx2 = false;          // 8 x i32
    bool avx_vnni = false;      // u8 x i8 dot products, 256 bits
    bool avx512_vnni = false;   // the same, 512 bits (with F, BW, VL and DQ)
    bool avx512_vbmi = false;   // permutations of bytes, 512 bits (with F, BW, VL, DQ and IFMA)
    bool neon = false;          // 4 x i32
    bool neon_dotprod = false;  // sdot, udot
    bool neon_i8mm = false;     // smmla, usmmla
};

#if defined(__x86_64__) && defined(__GNUC__)

inline CpuFeatures cpu_features() {
    auto bit = [](std::uint32_t word, int index) { return ((word >> index) & 1u) != 0; };
    CpuFeatures found;
    std::uint32_t a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !bit(c, 27) || !bit(c, 28)) return found;  // OSXSAVE, AVX
    // The operating system must save the wide registers, too (XCR0 bits 1-2: AVX, 5-7: AVX-512).
    std::uint32_t low = 0, high = 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    const bool saves_256 = (low & 0x06u) == 0x06u;
    const bool saves_512 = (low & 0xE6u) == 0xE6u;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
    const std::uint32_t subleaves = a;
    found.avx2 = saves_256 && bit(b, 5);
    const bool avx512 = saves_512 && bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31);  // F, DQ, BW, VL
    found.avx512_vnni = avx512 && bit(c, 11);
    found.avx512_vbmi = avx512 && bit(b, 21) && bit(c, 1);
    if (subleaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) found.avx_vnni = saves_256 && bit(a, 4);
    return found;
}

#elif defined(__aarch64__) && defined(__linux__)

inline CpuFeatures cpu_features() {
    constexpr unsigned long asimddp = 1ul << 20, i8mm = 1ul << 13;  // HWCAP_ASIMDDP, HWCAP2_I8MM
    CpuFeatures found;
    found.neon = true;  // part of AArch64
    found.neon_dotprod = (getauxval(AT_HWCAP) & asimddp) != 0;
    found.neon_i8mm = (getauxval(AT_HWCAP2) & i8mm) != 0;
    return found;
}

#elif defined(__aarch64__) && defined(__APPLE__)

inline CpuFeatures cpu_features() {
    auto has = [](const char* name) {
        int value = 0;
        std::size_t size = sizeof value;
        return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
    };
    CpuFeatures found;
    found.neon = true;
    found.neon_dotprod = has("hw.optional.arm.FEAT_DotProd");
    found.neon_i8mm = has("hw.optional.arm.FEAT_I8MM");
    return found;
}

#elif defined(__aarch64__) && defined(_WIN32)

inline CpuFeatures cpu_features() {
    constexpr unsigned long dotprod = 43, i8mm = 66;  // PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE, PF_ARM_V82_I8MM_...
    CpuFeatures found;
    found.neon = true;
    found.neon_dotprod = IsProcessorFeaturePresent(dotprod) != 0;
    found.neon_i8mm = IsProcessorFeaturePresent(i8mm) != 0;
    return found;
}

#else

inline CpuFeatures cpu_features() { return {}; }

#endif

}  // namespace fqvit
