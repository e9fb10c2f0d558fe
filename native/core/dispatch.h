// Selects the kernels for this CPU at run time.
#pragma once

#include <string>

#include "kernels/gemm.h"
#include "kernels/kernels.h"

namespace fqvit {

// The kernels of one instruction set.
struct KernelSet {
    const char* name;
    const Gemm* gemm;
    const Kernels* kernels;
};

// name: one of instruction_sets(), or "" for the fastest. Throws BadProgram if this build or CPU does not have it.
KernelSet select_kernels(const std::string& name);

}  // namespace fqvit
