// Runs the programs that native/fuzz/make_seeds.py wrote, in builds with sanitizers: several engines at once, each
// called from several threads, on every instruction set and with several batch sizes. All must give the same bits.
//
//   programs_test FOLDER...
#include <atomic>
#include <cstdio>
#include <thread>

#include "fuzz/program.h"

namespace {

using namespace fqvit;
using namespace fqvit::fuzz;

constexpr std::int64_t IMAGES = 4;
constexpr Limits NO_LIMITS{std::int64_t{1} << 40, std::int64_t{1} << 40};

// Returns the number of wrong results, or -1 if the engine rejects the program.
int check(const std::vector<std::uint8_t>& bytes) {
    const Program program = decode(bytes.data(), bytes.size());
    std::vector<std::uint8_t> images;
    Outputs expected;
    for (std::uint32_t i = 0; i < IMAGES; ++i) {
        const std::vector<std::uint8_t> one = image_of(program, i);
        images.insert(images.end(), one.begin(), one.end());
    }
    std::atomic<int> wrong{0};
    try {
        const std::unique_ptr<Engine> unfused = build(program, "scalar", 1, true, NO_LIMITS);
        expected = run(*unfused, images, IMAGES);
        int number = 0;
        for (const OwnedRecord& record : program.records) {
            if (++number, !record.tag.empty() && !within_range(*unfused, number)) ++wrong;
        }
    } catch (const BadProgram&) {
        return -1;
    }
    const auto compare = [&](Engine& engine, std::int64_t count) {
        if (!is_prefix(run(engine, images, count), expected)) ++wrong;
        std::vector<std::uint8_t> first(static_cast<std::size_t>(engine.output().bytes() * count));
        engine.run(images.data(), count, first.data());
        if (!std::equal(first.begin(), first.end(), expected.front().begin())) ++wrong;
    };
    for (const std::string& isa : instruction_sets()) {
        const std::unique_ptr<Engine> one = build(program, isa, 1, false, NO_LIMITS),
                                      three = build(program, isa, 3, false, NO_LIMITS);
        std::vector<std::thread> callers;
        for (int caller = 0; caller < 3; ++caller) {
            callers.emplace_back([&, caller] {
                for (const std::int64_t count : {std::int64_t{1}, std::int64_t{0}, IMAGES, IMAGES - 1})
                    compare(caller == 0 ? *one : *three, count);
            });
        }
        // Meanwhile another engine is created and destroyed.
        compare(*build(program, isa, 2, true, NO_LIMITS), 2);
        for (std::thread& caller : callers) caller.join();
        three->profile(images.data(), 1);
        if (one->constant_bytes() == 0 && one->arena_bytes() == 0) ++wrong;
    }
    return wrong;
}

}  // namespace

int main(int count, char** arguments) {
    int programs = 0, wrong = 0, rejected = 0;
    for (int i = 1; i < count; ++i) {
        for (const auto& entry : std::filesystem::directory_iterator(arguments[i])) {
            const int found = check(bytes_of(entry.path()));
            ++programs;
            if (found < 0) ++rejected;
            if (found != 0)
                std::printf("%s: %s\n", entry.path().string().c_str(), found < 0 ? "rejected" : "different bits");
            if (found > 0) ++wrong;
        }
    }
    std::printf("%d programs, %d wrong, %d rejected\n", programs, wrong, rejected);
    return programs == 0 || wrong > 0 || rejected > 0 ? 1 : 0;
}
