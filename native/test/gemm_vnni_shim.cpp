// Compiles gemm_vnni.cpp with vpdpbusd emulated in C++. gemm_test.cpp compares it with plain loops.
#define FQVIT_VNNI_SHIM
#include "kernels/vnni/gemm_vnni.cpp"
