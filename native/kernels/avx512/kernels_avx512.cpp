// The table of kernels for CPUs with AVX-512 F, BW, VL, DQ, IFMA, VBMI and VNNI. Entries without an AVX-512 version are
// those of AVX2.
#if defined(__x86_64__) && defined(__GNUC__)

#include "kernels/avx512/kernels_avx512.h"

namespace fqvit {

const Kernels* FQVIT_AVX512_NAME(kernels_avx512)() {
    static const Kernels table = [] {
        Kernels made = *FQVIT_AVX512_NAMESPACE::fallback();
        made.name = "avx512";
        made.epilogue = FQVIT_AVX512_NAMESPACE::epilogue;
        made.layernorm = FQVIT_AVX512_NAMESPACE::layernorm;
        made.groups_tables = true;
        made.attention = FQVIT_AVX512_NAMESPACE::attention;
        made.attention_scratch = FQVIT_AVX512_NAMESPACE::attention_scratch;
        return made;
    }();
    return &table;
}

}  // namespace fqvit

#elif !defined(FQVIT_AVX512_SHIM)

#include "kernels/kernels.h"

namespace fqvit {
const Kernels* kernels_avx512() { return nullptr; }
}  // namespace fqvit

#endif
