// libFuzzer on the engine's boundary: bytes become records, records an engine or a refusal. What is accepted runs,
// stays inside the bounds that were promised, and gives the same bits on every instruction set, op by op or joined, on
// used memory or fresh.
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
    std::unique_ptr<Engine> kept;
    bool refused = false;
    try {
        kept = build(program, "scalar", 1, true, limits);
        if (kept == nullptr) return -1;
    } catch (const BadProgram&) {
        refused = true;
    }
    const std::vector<std::string> sets = instruction_sets();
    if (refused) {
        for (const std::string& isa : sets) {
            try {
                build(program, isa, 1, false, limits);
                fail("refused by scalar alone", isa);
            } catch (const BadProgram&) {}
        }
        return 0;
    }
    const std::vector<std::uint8_t> first = image_of(program, 1), second = image_of(program, 2);
    const Found expected = run(*kept, first, 1);
    int number = 0;
    for (const OwnedRecord& record : program.records) {
        if (++number, !record.tag.empty() && !inside(*kept, number)) fail("a value outside its bounds", record.tag);
    }
    for (const std::string& isa : sets) {
        for (const bool keep : {false, true}) {
            const std::unique_ptr<Engine> engine = build(program, isa, 1, keep, limits);
            if (run(*engine, first, 1) != expected) fail(keep ? "other bits" : "other bits, joined", isa);
            run(*engine, second, 1);
            if (run(*engine, first, 1) != expected) fail("other bits the second time", isa);
        }
    }
    return 0;
}
