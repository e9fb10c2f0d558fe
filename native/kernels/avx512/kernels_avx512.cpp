// The table of kernels for one of the two targets of avx512.h. Entries without an AVX-512 version are
// those of AVX2.
#if defined(__x86_64__) && defined(__GNUC__)

#include "kernels/avx512/kernels_avx512.h"

namespace fqvit {

const Kernels* FQVIT_AVX512_KERNELS() {
    static const Kernels table = [] {
        Kernels made = *FQVIT_AVX512_NAMESPACE::fallback();
#ifdef FQVIT_AVX512_BW
        made.name = "avx512bw";
#else
        made.name = "avx512";
#endif
        made.epilogue = FQVIT_AVX512_NAMESPACE::epilogue;
        made.layernorm = FQVIT_AVX512_SHARED::layernorm;
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
#ifdef FQVIT_AVX512_BW
const Kernels* kernels_avx512bw() { return nullptr; }
#else
const Kernels* kernels_avx512() { return nullptr; }
#endif
}  // namespace fqvit

#endif
