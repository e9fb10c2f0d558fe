// Products on AArch64 with sdot and udot, which add four products of bytes to each lane of 32 bits. dot_tiles_neon.h
// has the micro-kernels and says why they are exact.
#include "kernels/gemm.h"

// Before version 16, Clang offers these intrinsics only if -march enables them, not through the target attribute.
#if defined(__aarch64__) && defined(__GNUC__) && \
    (!defined(__clang__) || __clang_major__ >= 16 || defined(__ARM_FEATURE_DOTPROD))

#include <arm_neon.h>

#if defined(__ARM_FEATURE_DOTPROD)
#define FQVIT_TARGET
#else
#define FQVIT_TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
#endif

namespace fqvit {
namespace {

// With the intrinsic, g++ 12 moves accumulators between registers, which takes 2 of 26 cycles per step.
template <int lane>
FQVIT_TARGET __attribute__((always_inline)) inline int32x4_t dot_s8(int32x4_t acc, int8x16_t w, int8x16_t x) {
    asm("sdot %0.4s, %1.16b, %2.4b[%3]" : "+w"(acc) : "w"(w), "w"(x), "i"(lane));
    return acc;
}

template <int lane>
FQVIT_TARGET __attribute__((always_inline)) inline uint32x4_t dot_u8(uint32x4_t acc, uint8x16_t w, uint8x16_t x) {
    return vdotq_laneq_u32(acc, w, x, lane);
}

}  // namespace
}  // namespace fqvit

#include "kernels/neon/dot_tiles_neon.h"

namespace fqvit {

const Gemm* gemm_neon_dotprod() {
    static constexpr GemmNeon gemm("neon_dotprod");
    return &gemm;
}

const AttentionTiles* attention_tiles_neon_dotprod() { return &ATTENTION_TILES; }

}  // namespace fqvit

#else

#include "kernels/neon/kernels_neon.h"

namespace fqvit {
const Gemm* gemm_neon_dotprod() { return nullptr; }
const AttentionTiles* attention_tiles_neon_dotprod() { return nullptr; }
}  // namespace fqvit

#endif
