// An op of a program, checked and ready to run on one image. Formulas: src/fqvit/ir/ops.py, moves.py and attention.py.
//
// A constructor takes a Record, checks every index, shape, shift and bound, and packs the constants. It trusts nothing
// and throws BadProgram if a record breaks a rule, so run() needs no checks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/dispatch.h"
#include "fqvit/record.h"
#include "fqvit/value.h"

namespace fqvit {

// The addresses of all values of one image, indexed by value number.
using Frame = std::uint8_t* const*;

class Op {
public:
    virtual ~Op() = default;
    // The work is divided into items that can run in any order and on different threads.
    virtual std::int64_t items() const = 0;
    // Computes items begin..end - 1. scratch: a buffer of scratch() bytes, 64-byte aligned, one buffer per thread.
    virtual void run(Frame frame, std::int64_t begin, std::int64_t end, std::uint8_t* scratch) const = 0;
    virtual std::size_t scratch() const { return 0; }
    virtual std::int64_t macs() const { return 0; }
    virtual std::size_t bytes() const { return 0; }  // memory of the op's constants

    std::string tag;
    std::vector<int> inputs;
    int output = -1;
    Value value{};  // of the output
};

// The values defined so far and the kernels, for the constructor of an op.
struct Scope {
    const std::vector<Value>& values;
    const std::vector<bool>& is_constant;  // per value
    const KernelSet& kernels;
};

std::unique_ptr<Op> make_op(const Record& record, const Scope& scope);

}  // namespace fqvit
