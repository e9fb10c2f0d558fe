// An op of a program, checked and ready to run on one image. src/fqvit/ir/ has the formulas.
//
// A constructor takes the fields of the op, checks every index, shape, shift and bound, and packs the constants. It
// trusts nothing and throws BadProgram if a field breaks a rule, so run() needs no checks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/value.h"
#include "ops/scope.h"

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
    Value value{};  // describes the output
};

// Divides channels into blocks, so that threads can share the work of ops that have few rows.
struct ChannelBlocks {
    ChannelBlocks() = default;
    explicit ChannelBlocks(std::int64_t channels) : channels(channels), count((channels + BLOCK - 1) / BLOCK) {}
    std::int64_t first(std::int64_t block) const { return block * BLOCK; }
    std::int64_t size(std::int64_t first) const { return channels - first < BLOCK ? channels - first : BLOCK; }

    static constexpr std::int64_t BLOCK = 64;
    std::int64_t channels = 0, count = 0;
};

// Checks an op and prepares it to run. The caller sets `output`, the number of the value that the op writes.
std::unique_ptr<Op> make_op(const OpFields& fields, Scope& scope);

}  // namespace fqvit
