// RoIAlign compiled for AVX2, or without it in builds for other CPUs. kernels/roialign.h has the formula and the loops.
#include "kernels/roialign.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include "kernels/avx2/avx2.h"
#else
#define FQVIT_AVX2
#endif

namespace fqvit {

FQVIT_AVX2 void align_boxes_avx2(const RoiAlign& a, std::int64_t begin, std::int64_t end, RoiAlignScratch& scratch) {
    align_boxes(a, begin, end, scratch);
}

}  // namespace fqvit
