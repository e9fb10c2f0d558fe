// libFuzzer target: decodes bytes into records and loads them into an engine. A program that the engine accepts must
// run, stay within the inferred ranges, and give the same bits on every instruction set, with and without fusion, in
// new and in reused memory.
#include <cstdio>
#include <cstdlib>

#include "fuzz/program.h"

namespace {

using namespace fqvit;
using namespace fqvit::fuzz;

[[noreturn]] void fail(const char* problem, const std::string& isa) {
    std::fprintf(stderr, "%s (%s)\n", problem, isa.c_str());
    std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const Program program = decode(data, size);
    if (program.too_large) return -1;
    const Limits limits{1 << 17, 1 << 20};
    std::unique_ptr<Engine> unfused;
    bool rejected = false;
    try {
        unfused = build(program, "scalar", 1, true, limits);
        if (unfused == nullptr) return -1;
    } catch (const BadProgram&) {
        rejected = true;
    }
    const std::vector<std::string> sets = instruction_sets();
    if (rejected) {
        for (const std::string& isa : sets) {
            try {
                build(program, isa, 1, false, limits);
                fail("rejected by scalar, accepted here", isa);
            } catch (const BadProgram&) {}
        }
        return 0;
    }
    const std::vector<std::uint8_t> first = image_of(program, 1), second = image_of(program, 2);
    const Outputs expected = run(*unfused, first, 1);
    int number = 0;
    for (const OwnedRecord& record : program.records) {
        if (++number, !record.tag.empty() && !within_range(*unfused, number))
            fail("value outside its inferred range", record.tag);
    }
    for (const std::string& isa : sets) {
        for (const bool keep : {false, true}) {
            const std::unique_ptr<Engine> engine = build(program, isa, 1, keep, limits);
            if (run(*engine, first, 1) != expected) fail(keep ? "different bits" : "different bits, fused", isa);
            run(*engine, second, 1);
            if (run(*engine, first, 1) != expected) fail("different bits in the second run", isa);
        }
    }
    return 0;
}
