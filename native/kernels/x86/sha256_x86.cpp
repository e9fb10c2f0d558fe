// SHA-256 with the SHA extensions of x86: sha256rnds2 does two rounds, sha256msg1 and sha256msg2 extend the message.
#include "kernels/sha256.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <cpuid.h>
#include <immintrin.h>

namespace fqvit {
namespace {

__attribute__((target("sha,sse4.1,ssse3"))) void compress(std::uint32_t state[8], const std::uint8_t* data,
                                                          std::size_t blocks) {
    const __m128i swap_bytes = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    // The instructions hold the state as (A, B, E, F) and (C, D, G, H), highest lane first.
    const __m128i dcba = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state));
    const __m128i hgfe = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state + 4));
    const __m128i cdab = _mm_shuffle_epi32(dcba, 0xB1), efgh = _mm_shuffle_epi32(hgfe, 0x1B);
    __m128i abef = _mm_alignr_epi8(cdab, efgh, 8), cdgh = _mm_blend_epi16(efgh, cdab, 0xF0);
    for (; blocks > 0; --blocks, data += 64) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i message[4];
        for (int i = 0; i < 16; ++i) {  // four rounds each
            __m128i& current = message[i % 4];
            if (i < 4) {
                current = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data + 16 * i));
                current = _mm_shuffle_epi8(current, swap_bytes);
            } else {
                const __m128i last = message[(i + 3) % 4], before = message[(i + 2) % 4];
                current = _mm_sha256msg1_epu32(current, message[(i + 1) % 4]);
                current = _mm_add_epi32(current, _mm_alignr_epi8(last, before, 4));
                current = _mm_sha256msg2_epu32(current, last);
            }
            const auto* constants = reinterpret_cast<const __m128i*>(SHA256_ROUND_CONSTANTS + 4 * i);
            const __m128i sum = _mm_add_epi32(current, _mm_loadu_si128(constants));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0E));
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    const __m128i feba = _mm_shuffle_epi32(abef, 0x1B), dchg = _mm_shuffle_epi32(cdgh, 0xB1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(feba, dchg, 0xF0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

}  // namespace

Sha256Compress sha256_x86() {
    std::uint32_t a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c >> 9 & 1) == 0 || (c >> 19 & 1) == 0) return nullptr;  // SSSE3, SSE4.1
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (b >> 29 & 1) == 0) return nullptr;              // SHA
    return compress;
}

}  // namespace fqvit

#else

namespace fqvit {
Sha256Compress sha256_x86() { return nullptr; }
}  // namespace fqvit

#endif
