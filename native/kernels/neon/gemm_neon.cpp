// Products on AArch64 CPUs without dot-product instructions (ARMv8.0, such as Cortex-A53 and A72): multiply bytes to 16
// bits, then add pairs twice. dot_tiles_neon.h has the micro-kernels and says why they are exact.
#include "kernels/gemm.h"

#if defined(__aarch64__) && defined(__GNUC__)

#include <arm_neon.h>

#define FQVIT_TARGET

namespace fqvit {
namespace {

// A product of two i8 is at most 2^14, so the sum of two products exceeds 16 bits only if both products are 2^14.
template <int lane>
__attribute__((always_inline)) inline int32x4_t dot_s8(int32x4_t acc, int8x16_t w, int8x16_t x) {
    const int8x16_t quads = vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(x), lane));
    const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(quads)));
    const int32x4_t high = vpaddlq_s16(vmull_high_s8(w, quads));
    return vaddq_s32(acc, vpaddq_s32(low, high));
}

template <int lane>
__attribute__((always_inline)) inline uint32x4_t dot_u8(uint32x4_t acc, uint8x16_t w, uint8x16_t x) {
    const uint8x16_t quads = vreinterpretq_u8_u32(vdupq_laneq_u32(vreinterpretq_u32_u8(x), lane));
    const uint32x4_t low = vpaddlq_u16(vmull_u8(vget_low_u8(w), vget_low_u8(quads)));
    const uint32x4_t high = vpaddlq_u16(vmull_high_u8(w, quads));
    return vaddq_u32(acc, vpaddq_u32(low, high));
}

}  // namespace
}  // namespace fqvit

#include "kernels/neon/dot_tiles_neon.h"

namespace fqvit {

const Gemm* gemm_neon() {
    static constexpr GemmNeon gemm("neon");
    return &gemm;
}

const AttentionTiles& attention_tiles_neon() { return ATTENTION_TILES; }

}  // namespace fqvit

#else

namespace fqvit {
const Gemm* gemm_neon() { return nullptr; }
}  // namespace fqvit

#endif
