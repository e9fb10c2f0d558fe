// Compares the engine with outputs of the Python reference, on any platform. tests/native/test_platforms.py writes the
// cases: NAME.program (fuzz/program.h), NAME.images (u8) and NAME.answers (one output after the other, each with all
// images, little-endian).
//
//   answers_test FOLDER
#include <bit>
#include <cstdio>

#include "fuzz/program.h"

namespace {

using namespace fqvit;
using namespace fqvit::fuzz;

constexpr Limits NO_LIMITS{std::int64_t{1} << 40, std::int64_t{1} << 40};

// Appends elements in the byte order of the files.
void append_little_endian(std::vector<std::uint8_t>& to, const std::vector<std::uint8_t>& elements, std::size_t size) {
    for (std::size_t i = 0; i < elements.size(); i += size) {
        for (std::size_t j = 0; j < size; ++j) {
            to.push_back(elements[i + (std::endian::native == std::endian::little ? j : size - 1 - j)]);
        }
    }
}

std::vector<std::uint8_t> answers(Engine& engine, const std::vector<std::uint8_t>& images, std::int64_t count) {
    std::vector<std::uint8_t> all;
    const Outputs found = run(engine, images, count);
    const std::vector<int> outputs = engine.outputs();
    for (std::size_t i = 0; i < found.size(); ++i) {
        append_little_endian(all, found[i], static_cast<std::size_t>(size_of(engine.value(outputs[i]).dtype)));
    }
    return all;
}

}  // namespace

int main(int count, char** arguments) {
    int passed = 0, failed = 0;
    if (count != 2) return 2;
    for (const auto& entry : std::filesystem::directory_iterator(arguments[1])) {
        std::filesystem::path path = entry.path();
        if (path.extension() != ".program") continue;
        const std::vector<std::uint8_t> bytes = bytes_of(path);
        const Program program = decode(bytes.data(), bytes.size());
        const std::vector<std::uint8_t> images = bytes_of(path.replace_extension(".images"));
        const std::vector<std::uint8_t> expected = bytes_of(path.replace_extension(".answers"));
        const std::int64_t number = static_cast<std::int64_t>(images.size()) / elements(program.image);
        for (const std::string& isa : instruction_sets()) {
            for (const int threads : {1, 3}) {
                const bool same = answers(*build(program, isa, threads, false, NO_LIMITS), images, number) == expected;
                ++(same ? passed : failed);
                if (!same)
                    std::printf("%s: different bits (%s, %d threads)\n", path.stem().string().c_str(), isa.c_str(),
                                threads);
            }
        }
    }
    for (const std::string& isa : instruction_sets()) std::printf("%s\n", isa.c_str());
    std::printf("%d passed, %d failed\n", passed, failed);
    return failed == 0 && passed > 0 ? 0 : 1;
}
