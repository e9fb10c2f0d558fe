// Runs a small transformer on every available instruction set: all buffers of the unfused run and the result of the
// fused run must equal those of the scalar kernels, with 1 and 3 threads. The hash of the scalar result must be the
// same on every machine. Exits with 1 if something differs.
//
//   engine_test [NAME]...      only these instruction sets; without arguments all that are available
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "core/aligned.h"
#include "core/engine.h"
#include "test/random.h"

namespace {

using namespace fqvit;

// T tokens of C channels: 9 patches of 4 x 4 x 3 pixels and a class token, 4 heads of width 5. T, C, D, HIDDEN and
// CLASSES are not multiples of 8, so that vectors have tails.
constexpr std::int64_t SIDE = 3, PATCH = 4, COLORS = 3, T = SIDE * SIDE + 1, H = 4, D = 5, C = H * D, HIDDEN = 83,
                       CLASSES = 7;
constexpr std::int64_t IMAGES = 5, WIDE_BITS = 12;
constexpr std::uint64_t SEED = 0x2718281828459045ull;
constexpr std::uint32_t RESULTS = 0xebd6522b;  // never changes, because the meaning of ops never changes
const Shape IMAGE = {SIDE * PATCH, SIDE* PATCH, COLORS};

// Adds ops to an engine. Every engine gets the same constants, because they are drawn in the same order.
class Builder {
public:
    explicit Builder(Engine& engine) : engine_(engine) {}

    int transformer() {
        const int patches = add("permute", {0}, {},
                                {list({SIDE, PATCH, SIDE, PATCH, COLORS}), list({0, 2, 1, 3, 4}),
                                 list({SIDE * SIDE, PATCH * PATCH * COLORS}), none()});
        const int embedded = linear_codes(patches, PATCH * PATCH * COLORS, C, 8, 39);
        const int first = engine_.constant(random<std::uint8_t>(DType::u8, {1, C}, 0, 255));
        const int tokens = add("concat", {first, embedded}, {}, {});
        const int positions = engine_.constant(random<std::int16_t>(DType::i16, {T, C}, -3000, 3000));
        int x = sum(tokens, 1 << 24, 128, positions, 1 << 17, 0, 20);
        x = sum(linear_acc(attention(norm(x)), C, C), 1 << 10, 0, x, 1 << 18, 2048, 18);
        const int hidden = linear_codes(norm(x), C, HIDDEN, 8, 39);
        const int table =
            add("lookup", {hidden}, {0}, {random<std::uint8_t>(DType::u8, {256}, 0, 255), none(), none()});
        x = sum(linear_acc(table, HIDDEN, C), 1 << 9, 0, x, 1 << 18, 2048, 18);
        const int normed = norm(x);
        // The class token, and the mean of the other tokens.
        const int class_token = add("take", {normed}, {}, {random<std::int32_t>(DType::i32, {1}, 0, 0), list({0})});
        const int mean = add("mean", {normed}, {1 << 28, 31, 1, 128, 8}, {list({128}), none()});
        const int row = add("permute", {mean}, {}, {list({1, C}), list({0, 1}), none(), none()});
        const int both = add("concat", {class_token, row}, {}, {});
        const int flat = add("permute", {both}, {}, {list({2 * C}), list({0}), none(), none()});
        return linear(flat, 2 * C, CLASSES, 2, 8, 36);
    }

private:
    int attention(int x) {
        const int qkv = linear_codes(x, C, 3 * C, 8, 39);
        int parts[3];
        for (std::int64_t part = 0; part < 3; ++part) {
            parts[part] = add("permute", {qkv}, {}, {list({T, 3, H, D}), list({1, 0, 2}), none(), list({1, part})});
        }
        const int scores = add("matmul", {parts[0], parts[1]}, {1 << 30, 37, 120, 131, 0, 128, 8}, {none(), none()});
        std::vector<std::int32_t> table;  // each entry is an eighth smaller than the one before
        for (std::int32_t e = 1 << 20; e > 0; e -= (e + 7) / 8) table.push_back(e);
        const int softmax = add("log_softmax", {scores}, {4},
                                {own(DType::i32, {static_cast<std::int64_t>(table.size())}, table), none()});
        const int context = add("shift_matmul", {softmax, parts[2]}, {1 << 30, 44, 125, 4, 0, 128, 8}, {});
        return add("permute", {context}, {}, {list({H, T, D}), list({1, 0, 2}), list({T, C}), none()});
    }

    int norm(int x) {
        // y = (t g + b 2^26 + half) >> 40, where t is the normalized input in units of 2^-24. |g| <= 2^22 gives at most
        // 64 codes per standard deviation, and b in 2^20 .. 3 * 2^20 gives the mean a code of 64 to 192.
        std::vector<std::int32_t> affine;
        for (std::int64_t c = 0; c < C; ++c)
            affine.push_back(static_cast<std::int32_t>(random_.within(-(1 << 22), 1 << 22)));
        for (std::int64_t c = 0; c < C; ++c)
            affine.push_back(static_cast<std::int32_t>(random_.within(1 << 20, 3 << 20)));
        const Array alpha = random<std::uint8_t>(DType::u8, {C}, 0, 2);
        return add("layernorm", {x}, {1 << 10, 40, 26, 8}, {own(DType::i32, {2, C}, affine), list({2048}), alpha});
    }

    int linear_codes(int x, std::int64_t inputs, std::int64_t outputs, std::int64_t bits, std::int64_t shift) {
        return linear(x, inputs, outputs, 0, bits, shift);
    }
    int linear_acc(int x, std::int64_t inputs, std::int64_t outputs) { return linear(x, inputs, outputs, 1, 8, 1); }

    int linear(int x, std::int64_t inputs, std::int64_t outputs, std::int64_t out, std::int64_t bits,
               std::int64_t shift) {
        const Array w = random<std::int8_t>(DType::i8, {outputs, inputs}, -128, 127);
        const auto* weights = static_cast<const std::int8_t*>(w.data);
        std::vector<std::int32_t> bias(static_cast<std::size_t>(outputs));
        for (std::int64_t o = 0; o < outputs; ++o) {
            for (std::int64_t k = 0; k < inputs; ++k)
                bias[static_cast<std::size_t>(o)] -= 128 * weights[o * inputs + k];
        }
        const Array mult = random<std::int32_t>(DType::i32, {outputs}, 1 << 28, (1 << 30) - 1);
        const Array shifts = random<std::uint8_t>(DType::u8, {outputs}, shift - 1, shift);
        return add("linear", {x}, {out, bits},
                   {w, own(DType::i32, {outputs}, bias), mult, shifts, list({out == 0 ? 128 : 0})});
    }

    int sum(int a, std::int64_t a_mult, std::int64_t a_zero, int b, std::int64_t b_mult, std::int64_t b_zero,
            std::int64_t shift) {
        return add(
            "add", {a, b}, {shift, WIDE_BITS},
            {list({a_mult}), list({a_zero}), none(), list({b_mult}), list({b_zero}), none(), list({2048}), none()});
    }

    int add(const char* tag, std::vector<std::int64_t> inputs, std::vector<std::int64_t> ints,
            std::vector<Array> arrays) {
        return engine_.add(tag, Record{tag, std::move(inputs), std::move(ints), std::move(arrays)});
    }

    Array none() { return {DType::i32, {0}, nullptr}; }
    Array list(const std::vector<std::int64_t>& values) {
        return own(DType::i64, {static_cast<std::int64_t>(values.size())}, values);
    }

    template <class T>
    Array random(DType dtype, Shape shape, std::int64_t lo, std::int64_t hi) {
        std::vector<T> values(static_cast<std::size_t>(elements(shape)));
        for (T& value : values) value = static_cast<T>(random_.within(lo, hi));
        return own(dtype, std::move(shape), values);
    }

    template <class T>
    Array own(DType dtype, Shape shape, const std::vector<T>& values) {
        const auto* bytes = reinterpret_cast<const std::uint8_t*>(values.data());
        owned_.push_back(std::make_unique<AlignedVector<std::uint8_t>>(bytes, bytes + values.size() * sizeof(T)));
        return {dtype, std::move(shape), owned_.back()->data()};
    }

    Engine& engine_;
    Random random_{SEED};
    std::vector<std::unique_ptr<AlignedVector<std::uint8_t>>> owned_;
};

std::vector<std::uint8_t> make_images() {
    std::vector<std::uint8_t> images(static_cast<std::size_t>(IMAGES * elements(IMAGE)));
    Random random(SEED);
    for (std::uint8_t& pixel : images) pixel = static_cast<std::uint8_t>(random.within(0, 255));
    return images;
}

struct Result {
    std::vector<std::vector<std::uint8_t>> buffers;  // of the first image; empty if fused
    std::vector<std::uint8_t> y;                     // of all images
};

Result run(const std::string& set, int threads, bool keep) {
    Engine engine(IMAGE, set, threads);
    engine.finish(Builder(engine).transformer(), keep);
    const std::vector<std::uint8_t> images = make_images();
    Result result;
    result.y.resize(static_cast<std::size_t>(IMAGES * engine.output().bytes()));
    engine.run(images.data(), IMAGES, result.y.data());
    if (!keep) return result;
    engine.run(images.data(), 1, std::vector<std::uint8_t>(result.y.size()).data());
    for (int number = 1;; ++number) {
        const std::uint8_t* data = nullptr;
        try {
            data = engine.buffer(number);
        } catch (const BadProgram&) {
            return result;
        }
        result.buffers.emplace_back(data, data + engine.value(number).bytes());
    }
}

int passed = 0, failed = 0;

void expect(bool condition, const std::string& what) {
    ++(condition ? passed : failed);
    if (!condition) std::printf("%s\n", what.c_str());
}

}  // namespace

int main(int argc, char** argv) {
    const Result wanted = run("scalar", 1, true);
    const std::size_t out = wanted.y.size() / IMAGES;
    // Results must depend on the image: equal results would mean that values saturate, which would make the test weak.
    for (std::size_t i = 1; i < IMAGES; ++i) {
        expect(!std::equal(wanted.y.begin(), wanted.y.begin() + static_cast<std::ptrdiff_t>(out),
                           wanted.y.begin() + static_cast<std::ptrdiff_t>(i * out)),
               "images 0 and " + std::to_string(i) + " give the same result");
    }
    for (const std::string& set : instruction_sets()) {
        if (argc > 1 && std::none_of(argv + 1, argv + argc, [&](const char* name) { return name == set; })) continue;
        const int before = failed;
        for (const int threads : {1, 3}) {
            const std::string where = set + ", " + std::to_string(threads) + " threads";
            const Result plain = run(set, threads, true);
            expect(plain.buffers.size() == wanted.buffers.size(), where + ": different number of buffers");
            for (std::size_t i = 0; i < std::min(plain.buffers.size(), wanted.buffers.size()); ++i) {
                expect(plain.buffers[i] == wanted.buffers[i], where + ": buffer " + std::to_string(i + 1) + " differs");
            }
            expect(plain.y == wanted.y, where + ": results differ");
            expect(run(set, threads, false).y == wanted.y, where + ": fused results differ");
        }
        // "as scalar": the results of this instruction set equal those of the scalar kernels.
        std::printf("%s: %s\n", set.c_str(), failed == before ? "as scalar" : "differs");
    }
    std::uint32_t hash = 2166136261u;  // FNV-1a
    for (const std::uint8_t byte : wanted.y) hash = (hash ^ byte) * 16777619u;
    char problem[64];
    std::snprintf(problem, sizeof problem, "scalar: results %08x, expected %08x", hash, RESULTS);
    expect(hash == RESULTS, problem);
    std::printf("%d passed, %d failed\n", passed, failed);
    return failed == 0 ? 0 : 1;
}
