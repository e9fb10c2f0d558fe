// libFuzzer target: loads bytes as a .fqvit file, after making its fingerprint valid. A program that the loader accepts
// must run, stay within the inferred ranges, and give the same bits on every instruction set, with and without fusion,
// in new and in reused memory. Every instruction set must reject the same files, with the same message. A detector that
// the loader accepts must run on a small image and give the same detections with the fastest instruction set as with
// the scalar kernels.
#include <cstdio>
#include <cstdlib>

#include "detect/detector.h"
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

// Replaces the stored fingerprint by the one that matches the contents, if the container can be read and the stored
// fingerprint has the right length. Returns whether the file is a detector.
bool repair(Bytes& file) {
    bool is_detector = false;
    try {
        const Container container = read_container(borrow_memory(file.data(), file.size()));
        is_detector = container.metadata.contains(DETECTOR_KEY);
        const auto json = container.metadata.find(is_detector ? DETECTOR_KEY : PROGRAM_KEY),
                   stored = container.metadata.find("fingerprint");
        if (json == container.metadata.end() || stored == container.metadata.end()) return is_detector;
        const std::string& old = stored->second;
        const std::string valid = fingerprint_of(container, json->second);
        const auto found = std::search(file.begin(), file.end(), old.begin(), old.end());
        if (old.size() == valid.size() && found != file.end()) std::copy(valid.begin(), valid.end(), found);
    } catch (const BadProgram&) {}  // the loader must reject the file as well
    return is_detector;
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

// Returns whether the file belongs in the corpus.
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
            if (!same) fail("message differs from that of scalar: " + message + " / " + reason, isa);
        }
        return true;
    }
    const std::vector<int> buffers = buffers_of(*unfused);
    if (is_large(*unfused, buffers)) return false;
    const Shape& shape = unfused->engine().image().shape;
    const std::int64_t style = unfused->header().images;  // has no other effect, so mutations can choose the pixels
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

// Returns the detections in a small image, or the message if the detector is rejected.
std::string detections_of(const Bytes& file, const std::string& isa, bool run) {
    constexpr std::int64_t MOST_BYTES = 1 << 26, MOST_PROPOSALS = 64, HEIGHT = 40, WIDTH = 33;
    try {
        Detector detector(borrow_memory(file.data(), file.size()),
                          {.instruction_set = isa, .max_run_bytes = MOST_BYTES});
        if (!run || detector.header().between.proposals > MOST_PROPOSALS) return "";
        const Bytes pixels = image_of({HEIGHT, WIDTH, 3}, 0, 1);
        const Detections found =
            detector.detect_resized({pixels.data(), {HEIGHT, WIDTH}, 3 * WIDTH}, {2 * HEIGHT, WIDTH});
        std::string out = "found ";
        for (std::size_t i = 0; i < found.count(); ++i) {
            out += std::to_string(found.scores[i]) + " " + std::to_string(found.labels[i]) + " ";
            for (const std::int64_t edge : found.boxes[i]) out += std::to_string(edge) + " ";
        }
        for (const std::int32_t probability : found.probabilities) out += std::to_string(probability) + " ";
        return out;
    } catch (const BadProgram& error) {
        return error.what();
    }
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
    if (repair(file)) {
        const bool compared = is_compared(file);
        const std::string expected = detections_of(file, "scalar", compared);
        const std::vector<std::string> sets = instruction_sets();
        if (compared && detections_of(file, sets.front(), true) != expected)
            fail("result differs from that of scalar", sets.front());
        return 0;
    }
    if (is_compared(file)) return check_program(file) ? 0 : -1;
    std::string message;
    load_or_reject(file, "scalar", false, message);
    return 0;
}

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t max_size,
                                               unsigned seed) {
    return fqvit::fuzz::mutate(data, size, max_size, seed);
}
