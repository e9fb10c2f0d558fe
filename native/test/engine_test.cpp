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

#include "core/engine.h"
#include "test/random.h"

namespace {

using namespace fqvit;

// T tokens of C channels: 9 patches of 4 x 4 x 3 pixels and a class token, 4 heads of width 5. T, C, D, HIDDEN and
// CLASSES are not multiples of 8, so that vectorized loops have remainders.
constexpr std::int64_t SIDE = 3, PATCH = 4, COLORS = 3, T = SIDE * SIDE + 1, H = 4, D = 5, C = H * D, HIDDEN = 83,
                       CLASSES = 7;
constexpr std::int64_t IMAGES = 5, WIDE_BITS = 12;
constexpr std::uint64_t SEED = 0x2718281828459045ull;
constexpr std::uint32_t RESULTS = 0xebd6522b;  // never changes, because the meaning of ops never changes
const Shape IMAGE = {SIDE * PATCH, SIDE* PATCH, COLORS};

// Builds the program. Every call gives the same constants, because they are drawn in the same order.
class Builder {
public:
    Program transformer() {
        const std::string patches =
            permute(INPUT, {SIDE, PATCH, SIDE, PATCH, COLORS}, {0, 2, 1, 3, 4}, {SIDE * SIDE, PATCH * PATCH * COLORS});
        const std::string embedded = linear_codes(patches, PATCH * PATCH * COLORS, C, 8, 39);
        constant("first", random<std::uint8_t>(DType::u8, {1, C}, 0, 255));
        const std::string tokens = add(ConcatFields{"", {"first", embedded}});
        constant("positions", random<std::int16_t>(DType::i16, {T, C}, -3000, 3000));
        std::string x = sum(tokens, 1 << 24, 128, "positions", 1 << 17, 0, 20);
        x = sum(linear_acc(attention(norm(x)), C, C), 1 << 10, 0, x, 1 << 18, 2048, 18);
        const std::string hidden = linear_codes(norm(x), C, HIDDEN, 8, 39);
        const std::string table = add(LookupFields{.y = "", .x = hidden});
        constant(table + ".table", random<std::uint8_t>(DType::u8, {256}, 0, 255));
        x = sum(linear_acc(table, HIDDEN, C), 1 << 9, 0, x, 1 << 18, 2048, 18);
        const std::string normed = norm(x);
        // The class token, and the mean of the other tokens.
        constant("zero", random<std::int32_t>(DType::i32, {1}, 0, 0));
        const std::string class_token = add(TakeFields{"", normed, "zero"});
        const std::string mean = add(
            MeanFields{.y = "", .x = normed, .mult = 1 << 28, .shift = 31, .skip = 1, .zero = {{128}}, .y_zero = 128});
        const std::string row = permute(mean, {1, C}, {0, 1}, {});
        const std::string both = add(ConcatFields{"", {class_token, row}});
        const std::string flat = permute(both, {2 * C}, {0}, {});
        program_.outputs = {linear(flat, 2 * C, CLASSES, LinearOut::i32, 8, 36)};
        program_.input = IMAGE;
        return program_;
    }

private:
    std::string attention(const std::string& x) {
        const std::string qkv = linear_codes(x, C, 3 * C, 8, 39);
        std::string parts[3];
        for (std::int64_t part = 0; part < 3; ++part) {
            PermuteFields fields{.y = "", .x = qkv, .view = {T, 3, H, D}, .perm = {1, 0, 2}};
            fields.select = {1, part};
            parts[part] = add(fields);
        }
        const std::string scores = add(MatMulFields{.y = "",
                                                    .a = parts[0],
                                                    .b = parts[1],
                                                    .mult = {1 << 30},
                                                    .shift = 37,
                                                    .a_zero = 120,
                                                    .b_zero = 131,
                                                    .y_zero = 128});
        std::vector<std::int32_t> table;  // each entry is an eighth smaller than the one before
        for (std::int32_t e = 1 << 20; e > 0; e -= (e + 7) / 8) table.push_back(e);
        const std::string softmax = add(LogSoftmaxFields{.y = "", .x = scores});
        constant(softmax + ".table", array(DType::i32, {static_cast<std::int64_t>(table.size())}, table));
        const std::string context = add(ShiftMatMulFields{
            .y = "", .a = softmax, .v = parts[2], .mult = 1 << 30, .shift = 44, .v_zero = 125, .y_zero = 128});
        return permute(context, {H, T, D}, {1, 0, 2}, {T, C});
    }

    std::string norm(const std::string& x) {
        // y = (t * g + b * 2^26 + half) >> 40, where t is the normalized input in units of 2^-24. |g| <= 2^22 gives at
        // most 64 codes per standard deviation, and b in 2^20 .. 3 * 2^20 gives the mean a code of 64 to 192.
        std::vector<std::int32_t> affine;
        for (std::int64_t c = 0; c < C; ++c)
            affine.push_back(static_cast<std::int32_t>(random_.within(-(1 << 22), 1 << 22)));
        for (std::int64_t c = 0; c < C; ++c)
            affine.push_back(static_cast<std::int32_t>(random_.within(1 << 20, 3 << 20)));
        const std::string y = next();
        constant(y + ".affine", array(DType::i32, {2, C}, affine));
        constant(y + ".alpha", random<std::uint8_t>(DType::u8, {C}, 0, 2));
        return add(LayerNormFields{
            .y = "", .x = x, .epsilon = 1 << 10, .shift = 40, .b_shift = 26, .zero = {{2048}}, .alpha = y + ".alpha"});
    }

    std::string linear_codes(const std::string& x, std::int64_t inputs, std::int64_t outputs, std::int64_t bits,
                             std::int64_t shift) {
        return linear(x, inputs, outputs, LinearOut::codes, bits, shift);
    }
    std::string linear_acc(const std::string& x, std::int64_t inputs, std::int64_t outputs) {
        return linear(x, inputs, outputs, LinearOut::acc, 8, 1);
    }

    std::string linear(const std::string& x, std::int64_t inputs, std::int64_t outputs, LinearOut out,
                       std::int64_t bits, std::int64_t shift) {
        const std::string y = next();
        const Constant w = random<std::int8_t>(DType::i8, {outputs, inputs}, -128, 127);
        std::vector<std::int32_t> bias(static_cast<std::size_t>(outputs));
        for (std::int64_t o = 0; o < outputs; ++o) {
            for (std::int64_t k = 0; k < inputs; ++k)
                bias[static_cast<std::size_t>(o)] -= 128 * w.as<std::int8_t>()[o * inputs + k];
        }
        constant(y + ".w", w);
        constant(y + ".bias", array(DType::i32, {outputs}, bias));
        constant(y + ".mult", random<std::int32_t>(DType::i32, {outputs}, 1 << 28, (1 << 30) - 1));
        constant(y + ".shift", random<std::uint8_t>(DType::u8, {outputs}, shift - 1, shift));
        return add(
            LinearFields{.y = "", .x = x, .out = out, .y_zero = {{out == LinearOut::codes ? 128 : 0}}, .bits = bits});
    }

    std::string sum(const std::string& a, std::int64_t a_mult, std::int64_t a_zero, const std::string& b,
                    std::int64_t b_mult, std::int64_t b_zero, std::int64_t shift) {
        AddFields fields;
        fields.terms = {TermFields{a, {a_mult}, {{a_zero}}}, TermFields{b, {b_mult}, {{b_zero}}}};
        fields.shift = shift, fields.y_zero = {{2048}}, fields.bits = WIDE_BITS;
        return add(fields);
    }

    std::string permute(const std::string& x, Shape view, Shape perm, Shape shape) {
        return add(PermuteFields{
            .y = "", .x = x, .view = std::move(view), .perm = std::move(perm), .shape = std::move(shape)});
    }

    // The name of the buffer that the next op writes.
    std::string next() const { return "buffer " + std::to_string(program_.ops.size()); }

    template <class Fields>
    std::string add(Fields fields) {
        fields.y = next();
        program_.ops.push_back(fields);
        return fields.y;
    }

    void constant(const std::string& name, Constant value) { program_.constants.set(name, std::move(value)); }

    template <class T>
    Constant random(DType dtype, Shape shape, std::int64_t lo, std::int64_t hi) {
        std::vector<T> values(static_cast<std::size_t>(elements(shape)));
        for (T& value : values) value = static_cast<T>(random_.within(lo, hi));
        return array(dtype, std::move(shape), values);
    }

    template <class T>
    Constant array(DType dtype, Shape shape, const std::vector<T>& values) {
        const auto* bytes = reinterpret_cast<const std::uint8_t*>(values.data());
        return {dtype, std::move(shape), {bytes, bytes + values.size() * sizeof(T)}};
    }

    Program program_;
    Random random_{SEED};
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

Result run(const Program& program, const std::string& set, int threads, bool keep) {
    Engine engine(program, {.instruction_set = set, .threads = threads, .keep_buffers = keep});
    const std::vector<std::uint8_t> images = make_images();
    Result result;
    result.y.resize(static_cast<std::size_t>(IMAGES * engine.output().bytes()));
    engine.run(images.data(), IMAGES, result.y.data());
    if (!keep) return result;
    engine.run(images.data(), 1, std::vector<std::uint8_t>(result.y.size()).data());
    for (const OpFields& op : program.ops) {
        const int number = engine.find(output_of(op));
        const std::uint8_t* data = engine.buffer(number);
        result.buffers.emplace_back(data, data + engine.value(number).bytes());
    }
    return result;
}

int passed = 0, failed = 0;

void expect(bool condition, const std::string& what) {
    ++(condition ? passed : failed);
    if (!condition) std::printf("%s\n", what.c_str());
}

}  // namespace

int main(int argc, char** argv) {
    const Program program = Builder().transformer();
    const Result wanted = run(program, "scalar", 1, true);
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
            const Result plain = run(program, set, threads, true);
            expect(plain.buffers.size() == wanted.buffers.size(), where + ": different number of buffers");
            for (std::size_t i = 0; i < std::min(plain.buffers.size(), wanted.buffers.size()); ++i) {
                expect(plain.buffers[i] == wanted.buffers[i], where + ": " + output_of(program.ops[i]) + " differs");
            }
            expect(plain.y == wanted.y, where + ": results differ");
            expect(run(program, set, threads, false).y == wanted.y, where + ": fused results differ");
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
