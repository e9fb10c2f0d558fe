// libFuzzer target: loads bytes as a .fqvit file, after making its fingerprint valid. A program that the loader accepts
// must run, stay within the inferred ranges, and give the same bits on every instruction set, with and without fusion,
// in new and in reused memory. Every instruction set must reject the same files, with the same message.
#include <cstdio>
#include <cstdlib>

#include "fuzz/mutate.h"
#include "ir/container.h"
#include "test/programs.h"

namespace {

using namespace fqvit;
using namespace fqvit::test;

// Limits that keep a run within milliseconds: elements of the input and of all buffers, and multiplications.
constexpr std::int64_t MOST_PIXELS = 1 << 15, MOST_VALUES = 1 << 17, MOST_WORK = 1 << 25;

[[noreturn]] void fail(const std::string& problem, const std::string& isa) {
    std::fprintf(stderr, "%s (%s)\n", problem.c_str(), isa.c_str());
    std::abort();
}

// Replaces the fingerprint by that of the contents, if the container can be read and stores one of the right length.
void repair(Bytes& file) {
    try {
        const Container container = read_container(borrow_memory(file.data(), file.size()));
        const auto json = container.metadata.find(PROGRAM_KEY), stored = container.metadata.find("fingerprint");
        if (json == container.metadata.end() || stored == container.metadata.end()) return;
        const std::string& old = stored->second;
        const std::string valid = fingerprint_of(container, json->second);
        const auto found = std::search(file.begin(), file.end(), old.begin(), old.end());
        if (old.size() == valid.size() && found != file.end()) std::copy(valid.begin(), valid.end(), found);
    } catch (const BadProgram&) {}  // the loader must reject it, too
}

// Loads a file; returns null and the message if it is rejected.
std::unique_ptr<Model> load_or_reject(const Bytes& file, const std::string& isa, bool keep, std::string& message) {
    try {
        return load(file, isa, 1, keep);
    } catch (const BadProgram& error) {
        message = error.what();
        return nullptr;
    }
}

// Whether the program would take too long. Work: elements of all buffers times the longest row.
bool is_large(const Model& model, const std::vector<int>& buffers) {
    const Engine& engine = model.engine();
    std::int64_t all = engine.image().count(), longest = engine.image().channels();
    for (const int number : buffers) {
        all += engine.value(number).count();
        longest = std::max(longest, engine.value(number).channels());
    }
    return engine.image().count() > MOST_PIXELS || all > MOST_VALUES || all > MOST_WORK / longest;
}

void compare(const Bytes& file, const std::string& isa, bool keep, const Bytes images[2], const Outputs& expected) {
    const std::unique_ptr<Model> model = load(file, isa, 1, keep);
    if (run(model->engine(), images[0], 1) != expected) fail(keep ? "different bits" : "different bits, fused", isa);
    run(model->engine(), images[1], 1);
    if (run(model->engine(), images[0], 1) != expected) fail("different bits in the second run", isa);
}

// Returns whether the file belongs into the corpus.
bool check_program(const Bytes& file) {
    const std::vector<std::string> sets = instruction_sets();
    std::string reason;
    const std::unique_ptr<Model> unfused = load_or_reject(file, "scalar", true, reason);
    if (unfused == nullptr) {
        for (const std::string& isa : sets) {
            std::string message;
            if (load_or_reject(file, isa, false, message) != nullptr) fail("rejected by scalar, accepted here", isa);
            // The size of packed weights depends on the instruction set.
            const bool same = message == reason || reason.find("parameters need") != std::string::npos;
            if (!same) fail("another message than scalar: " + message + " / " + reason, isa);
        }
        return true;
    }
    const std::vector<int> buffers = buffers_of(*unfused);
    if (is_large(*unfused, buffers)) return false;
    const Shape& shape = unfused->engine().image().shape;
    const std::int64_t style = unfused->header().images;  // has no other effect, so mutations choose the pixels
    const Bytes images[] = {image_of(shape, style, 1), image_of(shape, style + 1, 2)};
    const Outputs expected = run(unfused->engine(), images[0], 1);
    for (const int number : buffers) {
        if (!within_range(unfused->engine(), number)) fail("value outside its inferred range", "scalar");
    }
    for (const std::string& isa : sets) {
        for (const bool keep : {false, true}) compare(file, isa, keep, images, expected);
    }
    return true;
}

// FQVIT_FUZZ_EVERY=N: load every file, but compare and run only one in N, chosen by its contents.
bool is_compared(const Bytes& file) {
    static const char* const given = std::getenv("FQVIT_FUZZ_EVERY");
    static const unsigned long every = given == nullptr ? 1 : std::max(std::strtoul(given, nullptr, 10), 1ul);
    std::uint32_t hash = 2166136261u;  // FNV-1a
    for (const std::uint8_t byte : file) hash = (hash ^ byte) * 16777619u;
    return (hash >> 8) % every == 0;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    Bytes file(data, data + size);
    repair(file);
    if (is_compared(file)) return check_program(file) ? 0 : -1;
    std::string message;
    load_or_reject(file, "scalar", false, message);
    return 0;
}

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t max_size,
                                               unsigned seed) {
    return fqvit::fuzz::mutate(data, size, max_size, seed);
}
