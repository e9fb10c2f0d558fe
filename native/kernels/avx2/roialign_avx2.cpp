// RoIAlign compiled for AVX2; elsewhere the scalar version.
#include "kernels/roialign_box.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include "kernels/avx2/avx2.h"
#else
#define FQVIT_AVX2
#endif

namespace fqvit {

FQVIT_AVX2 void align_boxes_avx2(const Alignment& a, std::int64_t begin, std::int64_t end, AlignScratch& scratch) {
    align_boxes(a, begin, end, scratch);
}

}  // namespace fqvit
