// gemm_vnni.cpp once more, with vpdpbusd in plain C++; gemm_test.cpp runs it beside the real one.
#define FQVIT_VNNI_SHIM
#include "kernels/vnni/gemm_vnni.cpp"
