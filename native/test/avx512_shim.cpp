// Compiles the kernels of kernels/avx512/ with the operations of avx512_shim.h. attention_test.cpp compares them with
// plain loops.
#define FQVIT_AVX512_SHIM
#include "kernels/avx512/attention_avx512.cpp"
#include "kernels/avx512/kernels_avx512.cpp"
