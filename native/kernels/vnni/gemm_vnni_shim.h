// vpdpbusd emulated in C++, so that tests run the packing and tiling of gemm_vnni.cpp, bit for bit, on x86-64 CPUs
// without the instruction. Compiled by test/gemm_vnni_shim.cpp.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/gemm.h"

namespace fqvit {
// The VNNI kernels with the emulated instruction; null on CPUs other than x86-64.
const Gemm* gemm_avx_vnni_shim();
const Gemm* gemm_avx512_vnni_shim();
const Gemm* gemm_avx512_vnni_prefetch_shim();
}  // namespace fqvit

namespace fqvit::shim {

template <int N>
struct Lanes {
    std::uint32_t lane[N];  // unsigned: the instruction wraps
};

template <int N>
inline Lanes<N> dot4(Lanes<N> acc, const Lanes<N>& x, const Lanes<N>& w) {
    for (int i = 0; i < N; ++i) {
        for (int byte = 0; byte < 32; byte += 8) {
            const std::int32_t a = static_cast<std::uint8_t>(x.lane[i] >> byte),
                               b = static_cast<std::int8_t>(w.lane[i] >> byte);
            acc.lane[i] += static_cast<std::uint32_t>(a * b);
        }
    }
    return acc;
}

template <int N>
inline Lanes<N> load_lanes(const std::int8_t* from) {
    Lanes<N> v;
    std::memcpy(v.lane, from, sizeof v.lane);
    return v;
}

template <int N>
inline Lanes<N> broadcast_quad(const std::uint8_t* from) {
    Lanes<N> v;
    for (std::uint32_t& lane : v.lane) std::memcpy(&lane, from, 4);
    return v;
}

template <int N>
inline void store(std::int32_t* to, const Lanes<N>& v) {
    std::memcpy(to, v.lane, sizeof v.lane);
}

}  // namespace fqvit::shim
