// Compares the scalar RoIAlign on one thread with that of the fastest instruction set on three threads, on random and
// extreme boxes. `make sanitize` builds this test with sanitizers; tests/detect compares the results with numpy.
// Exits with 1 if something differs.
#include "core/roialign.h"

#include <cstdio>
#include <vector>

#include "test/random.h"

namespace {

using namespace fqvit;

// Returns whether the two runs give the same bits. extreme: the longest feature map, filled with 255.
bool same(Random& random, bool extreme) {
    const bool tall = random.within(0, 1) == 1;
    const std::int64_t height = extreme && tall ? RoiAlign::MAX_CELLS : random.within(1, 40);
    const std::int64_t width = extreme && !tall ? RoiAlign::MAX_CELLS : random.within(1, 40);
    const std::int64_t channels = random.within(1, extreme ? 2 : 40), count = random.within(0, 12);
    const std::int64_t side = random.within(1, 16);
    std::vector<std::uint8_t> map(static_cast<std::size_t>(height * width * channels), 255);
    if (!extreme) {
        for (std::uint8_t& code : map) code = static_cast<std::uint8_t>(random.within(0, 255));
    }
    const std::int64_t reach = std::int64_t{1} << random.within(8, 24), cell = std::int64_t{1} << random.within(8, 18);
    std::vector<std::int64_t> boxes(static_cast<std::size_t>(4 * count));
    for (std::int64_t& edge : boxes) edge = random.within(-reach, reach);
    std::vector<std::uint8_t> one(static_cast<std::size_t>(count * side * side * channels)), other(one.size());
    const auto zero = static_cast<std::int32_t>(extreme ? 0 : random.within(0, 255));
    const auto shift = static_cast<int>(random.within(1, 62));
    RoiAlign a{.map = map.data(),
               .height = height,
               .width = width,
               .channels = channels,
               .zero = zero,
               .boxes = boxes.data(),
               .count = count,
               .side = side,
               .cell = cell,
               .mult = (std::int64_t{1} << 31) - 1,
               .shift = shift,
               .head_zero = 9,
               .last = 255,
               .y = one.data()};
    check_roi_align(a);
    roi_align(a, 1, "scalar");
    a.y = other.data();
    roi_align(a, 3, "");
    return one == other;
}

}  // namespace

int main() {
    Random random(0x2718281828459045ull);
    int passed = 0, failed = 0;
    for (int round = 0; round < 300; ++round) (same(random, round % 25 == 0) ? passed : failed) += 1;
    std::printf("%d passed, %d failed\n", passed, failed);
    return failed == 0 ? 0 : 1;
}
