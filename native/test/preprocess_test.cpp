// Tests preprocess() without Python: rows with padding, dropped alpha, bad arguments, and the outputs for many
// random images, which must be bit-identical on every platform. tests/native/test_preprocess.py compares the outputs
// with those of Pillow.
// Exits with 1 if something differs.
#include "image/preprocess.h"

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "core/value.h"
#include "test/random.h"

namespace {

using namespace fqvit;
using Bytes = std::vector<std::uint8_t>;

// FNV-1a hash of all outputs that main() computes. Recorded on x86-64, where the outputs of preprocess() equal those of
// Pillow 13.
constexpr std::uint64_t EXPECTED_HASH = 0xf7394fb036d44d6full;

struct Image {
    std::int64_t height, width, channels, stride;
    Bytes bytes;
};

Bytes run(const Preprocess& p, const Image& image) {
    Bytes out(static_cast<std::size_t>(p.height * p.width * p.channels), 77);
    preprocess(p, image.bytes.data(), image.height, image.width, image.channels, image.stride, out.data());
    return out;
}

// extreme: pixels are 0 or 255, so that the sums reach their bounds.
Image random_image(Random& random, bool extreme) {
    constexpr std::int64_t CHANNELS[] = {1, 3, 4};
    Image image{random.within(1, 60), random.within(1, 60), CHANNELS[random.within(0, 2)], 0, {}};
    if (random.within(0, 3) == 0) (random.within(0, 1) == 0 ? image.height : image.width) = random.within(61, 2000);
    image.stride = image.width * image.channels;
    image.bytes.resize(static_cast<std::size_t>(image.height * image.stride));
    for (std::uint8_t& byte : image.bytes) {
        byte = static_cast<std::uint8_t>(extreme ? 255 * random.within(0, 1) : random.within(0, 255));
    }
    return image;
}

// Returns the same image with up to 9 bytes of noise after each row but the last. The allocation ends with the last
// row, so that sanitizers see a read past it.
Image with_padding(const Image& image, Random& random) {
    Image padded = image;
    padded.stride += random.within(1, 9);
    padded.bytes.assign(static_cast<std::size_t>((image.height - 1) * padded.stride + image.stride), 0);
    for (std::uint8_t& byte : padded.bytes) byte = static_cast<std::uint8_t>(random.within(0, 255));
    for (std::int64_t y = 0; y < image.height; ++y) {
        std::copy_n(image.bytes.begin() + y * image.stride, image.stride, padded.bytes.begin() + y * padded.stride);
    }
    return padded;
}

Image without_alpha(const Image& image) {
    Image rgb{image.height, image.width, 3, image.width * 3, {}};
    for (std::size_t i = 0; i < image.bytes.size(); ++i) {
        if (i % 4 != 3) rgb.bytes.push_back(image.bytes[i]);
    }
    return rgb;
}

Preprocess random_preprocess(Random& random) {
    return {.height = random.within(1, 48),
            .width = random.within(1, 48),
            .channels = random.within(0, 1) * 2 + 1,
            .resize = random.within(1, 64),
            .interpolation = random.within(0, 1) == 0 ? Interpolation::bilinear : Interpolation::bicubic,
            .mean = {},
            .std = {},
            .squash = false};
}

// Returns whether the call throws BadProgram with a message that contains `text`.
bool rejects(const Preprocess& p, std::int64_t height, std::int64_t width, std::int64_t channels, std::int64_t stride,
             const char* text) {
    std::uint8_t pixel[4] = {}, out[4] = {};  // never read or written: the arguments are checked first
    try {
        preprocess(p, pixel, height, width, channels, stride, out);
    } catch (const BadProgram& e) {
        const std::string message = e.what();
        if (message.find(text) != std::string::npos && message.find('\n') == std::string::npos) return true;
        std::printf("expected '%s', got '%s'\n", text, e.what());
        return false;
    }
    std::printf("expected '%s', got no error\n", text);
    return false;
}

int count_rejected() {
    constexpr std::int64_t HUGE_SIDE = Preprocess::MAX_IMAGE_SIDE + 1, MAX = INT64_MAX, MIN = INT64_MIN;
    const Preprocess good{1, 1, 3, 1, Interpolation::bicubic, {}, {}, false};
    int rejected = 0;
    for (const std::int64_t bad : {std::int64_t{0}, std::int64_t{-1}, std::int64_t{8193}, MAX, MIN}) {
        Preprocess p = good;
        p.height = bad, rejected += rejects(p, 1, 1, 3, 3, "height is");
        p = good, p.width = bad, rejected += rejects(p, 1, 1, 3, 3, "width is");
        p = good, p.resize = bad, rejected += rejects(p, 1, 1, 3, 3, "resize is");
        p = good, p.channels = bad, rejected += rejects(p, 1, 1, 3, 3, "channels is");
    }
    for (const std::int64_t bad : {std::int64_t{0}, std::int64_t{-1}, HUGE_SIDE, MAX, MIN}) {
        rejected += rejects(good, bad, 1, 3, 3, "height of the image");
        rejected += rejects(good, 1, bad, 3, MAX, "width of the image");
        rejected += rejects(good, 1, 1, bad, MAX, "channels, expected 1, 3 or 4");
        rejected += rejects(good, 1, 2, 3, bad == HUGE_SIDE ? 5 : bad, "stride of the image");
    }
    return rejected;
}

}  // namespace

int main() {
    Random random(0x3141592653589793ull);
    int passed = 0, failed = 0;
    std::uint64_t hash = 0xcbf29ce484222325ull;
    const auto expect = [&](bool condition) { (condition ? passed : failed) += 1; };
    for (int round = 0; round < 600; ++round) {
        const Image image = random_image(random, round % 3 == 0);
        Preprocess p = random_preprocess(random);
        p.squash = round % 4 == 0;
        const Bytes out = run(p, image);
        for (const std::uint8_t byte : out) hash = (hash ^ byte) * 0x100000001b3ull;
        expect(out == run(p, with_padding(image, random)));
        if (image.channels == 4) expect(out == run(p, without_alpha(image)));
    }
    expect(count_rejected() == 40);
    expect(hash == EXPECTED_HASH);
    if (hash != EXPECTED_HASH) std::printf("hash 0x%016llxull\n", static_cast<unsigned long long>(hash));
    std::printf("%d passed, %d failed\n", passed, failed);
    return failed == 0 ? 0 : 1;
}
