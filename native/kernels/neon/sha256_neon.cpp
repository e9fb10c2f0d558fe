// SHA-256 with the cryptographic extension of AArch64: vsha256h and vsha256h2 do four rounds, vsha256su0 and vsha256su1
// extend the message.
#include "kernels/sha256.h"

// Before version 16, Clang offers these intrinsics only if -march enables them, not through the target attribute.
#if defined(__aarch64__) && (defined(__linux__) || defined(__APPLE__)) && \
    (!defined(__clang__) || __clang_major__ >= 16 || defined(__ARM_FEATURE_SHA2))

#if defined(__clang__)
#define FQVIT_CRYPTO __attribute__((target("sha2")))
#else
#pragma GCC target("+crypto")
#define FQVIT_CRYPTO
#endif
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif

namespace fqvit {
namespace {

FQVIT_CRYPTO void compress(std::uint32_t state[8], const std::uint8_t* data, std::size_t blocks) {
    uint32x4_t abcd = vld1q_u32(state), efgh = vld1q_u32(state + 4);
    for (; blocks > 0; --blocks, data += 64) {
        const uint32x4_t abcd_before = abcd, efgh_before = efgh;
        uint32x4_t message[4];
        for (int i = 0; i < 16; ++i) {  // four rounds each
            uint32x4_t& current = message[i % 4];
            if (i < 4) {
                current = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(data + 16 * i)));
            } else {
                current = vsha256su0q_u32(current, message[(i + 1) % 4]);
                current = vsha256su1q_u32(current, message[(i + 2) % 4], message[(i + 3) % 4]);
            }
            const uint32x4_t sum = vaddq_u32(current, vld1q_u32(SHA256_ROUND_CONSTANTS + 4 * i));
            const uint32x4_t abcd_now = abcd;
            abcd = vsha256hq_u32(abcd_now, efgh, sum);
            efgh = vsha256h2q_u32(efgh, abcd_now, sum);
        }
        abcd = vaddq_u32(abcd, abcd_before);
        efgh = vaddq_u32(efgh, efgh_before);
    }
    vst1q_u32(state, abcd);
    vst1q_u32(state + 4, efgh);
}

}  // namespace

Sha256Compress sha256_neon() {
#if defined(__linux__)
    constexpr unsigned long sha2 = 1ul << 6;  // HWCAP_SHA2
    if ((getauxval(AT_HWCAP) & sha2) == 0) return nullptr;
#endif
    return compress;  // every Apple processor has the extension
}

}  // namespace fqvit

#else

namespace fqvit {
Sha256Compress sha256_neon() { return nullptr; }
}  // namespace fqvit

#endif
