// The peak speed of this machine for products of u8 activations and i8 weights, as reached by the micro-kernel.
#pragma once

#include <cstdint>
#include <string>

namespace fqvit {

struct Peak {
    const char* instruction_set;
    std::int64_t macs_per_second;  // multiply-accumulates of one thread
};

// Measures the micro-kernel on one tile whose operands stay in the L1 cache, without packing or epilogue, for about
// 30 ms. Returns the speed of the fastest short interval, so that other programs hardly affect it. instruction_set: as
// in select_kernels.
Peak measure_peak(const std::string& instruction_set);

}  // namespace fqvit
