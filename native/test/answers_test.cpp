// Compares the engine with outputs of the Python reference, on any platform. tests/native/test_platforms.py writes the
// cases: NAME.fqvit, NAME.images (u8) and NAME.answers (one output after the other, each with all images,
// little-endian).
//
//   answers_test FOLDER
#include <bit>
#include <cstdio>

#include "test/programs.h"

namespace {

using namespace fqvit;
using namespace fqvit::test;

// Appends elements in the byte order of the files.
void append_little_endian(Bytes& to, const Bytes& elements, std::size_t size) {
    for (std::size_t i = 0; i < elements.size(); i += size) {
        for (std::size_t j = 0; j < size; ++j) {
            to.push_back(elements[i + (std::endian::native == std::endian::little ? j : size - 1 - j)]);
        }
    }
}

Bytes answers(Engine& engine, const Bytes& images) {
    Bytes all;
    const std::int64_t count = static_cast<std::int64_t>(images.size()) / engine.image().count();
    const Outputs found = run(engine, images, count);
    const std::vector<int>& outputs = engine.outputs();
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
        if (path.extension() != ".fqvit") continue;
        const Bytes file = read_file(path);
        const Bytes images = read_file(path.replace_extension(".images"));
        const Bytes expected = read_file(path.replace_extension(".answers"));
        for (const std::string& isa : instruction_sets()) {
            for (const int threads : {1, 3}) {
                const bool same = answers(load(file, isa, threads, false)->engine(), images) == expected;
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
