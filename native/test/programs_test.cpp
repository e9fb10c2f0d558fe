// Runs the .fqvit files that native/fuzz/make_seeds.py wrote, in builds with sanitizers: several engines at once, each
// called from several threads, on every instruction set and with several batch sizes. All runs must give the same
// bits.
//
//   programs_test FOLDER...
#include <atomic>
#include <cstdio>
#include <thread>

#include "test/programs.h"

namespace {

using namespace fqvit;
using namespace fqvit::test;

constexpr std::int64_t IMAGES = 4;

// Returns the number of wrong results, or -1 if the engine rejects the file.
int check(const Bytes& file) {
    Bytes images;
    Outputs expected;
    std::atomic<int> wrong{0};
    try {
        const std::unique_ptr<Model> unfused = load(file, "scalar", 1, true);
        Engine& engine = unfused->engine();
        for (std::uint32_t i = 0; i < IMAGES; ++i) {
            const Bytes one = image_of(engine.image().shape, unfused->header().images + i, i);
            images.insert(images.end(), one.begin(), one.end());
        }
        expected = run(engine, images, IMAGES);
        for (const int number : buffers_of(*unfused)) wrong += within_range(engine, number) ? 0 : 1;
    } catch (const BadProgram&) {
        return -1;
    }
    const auto compare = [&](Engine& engine, std::int64_t count) {
        if (!is_prefix(run(engine, images, count), expected)) ++wrong;
        Bytes first(static_cast<std::size_t>(engine.output().bytes() * count));
        engine.run(images.data(), count, first.data());
        if (!std::equal(first.begin(), first.end(), expected.front().begin())) ++wrong;
    };
    for (const std::string& isa : instruction_sets()) {
        const std::unique_ptr<Model> one = load(file, isa, 1, false), three = load(file, isa, 3, false);
        std::vector<std::thread> callers;
        for (int caller = 0; caller < 3; ++caller) {
            callers.emplace_back([&, caller] {
                for (const std::int64_t count : {std::int64_t{1}, std::int64_t{0}, IMAGES, IMAGES - 1})
                    compare(caller == 0 ? one->engine() : three->engine(), count);
            });
        }
        // Meanwhile another engine is created and destroyed.
        compare(load(file, isa, 2, true)->engine(), 2);
        for (std::thread& caller : callers) caller.join();
        three->engine().profile(images.data(), 1);
        if (one->engine().constant_bytes() == 0 && one->engine().arena_bytes() == 0) ++wrong;
    }
    return wrong;
}

}  // namespace

int main(int count, char** arguments) {
    int programs = 0, wrong = 0, rejected = 0;
    for (int i = 1; i < count; ++i) {
        for (const auto& entry : std::filesystem::directory_iterator(arguments[i])) {
            const int found = check(read_file(entry.path()));
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
