// kernels_avx512.cpp for CPUs without VBMI and IFMA; see avx512.h.
#define FQVIT_AVX512_BW
#include "kernels/avx512/kernels_avx512.cpp"
