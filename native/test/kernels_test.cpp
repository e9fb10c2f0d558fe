// Compares the epilogue and LayerNorm of every instruction set with the scalar ones: random parameters and shapes,
// extreme values, every kind and type. Nothing outside the tile may change. Prints one line per instruction set and
// exits with 1 if a result differs.
//
//   kernels_test [NAME]...      only these instruction sets; without arguments all that are available
#include "kernels/kernels.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "core/aligned.h"
#include "core/cpu.h"
#include "core/fixed.h"
#include "kernels/quick_norm.h"
#include "kernels/table_lines.h"
#include "ops/requantization.h"
#include "test/random.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define FQVIT_AVX512_SHIM
#include "kernels/avx512/kernels_avx512.h"
#endif

namespace {

using namespace fqvit;

constexpr std::uint8_t POISON = 0xa5;

struct Tally {
    long passed = 0, failed = 0;

    void count(bool same, const char* table, const std::string& what) {
        ++(same ? passed : failed);
        if (!same && failed <= 20) std::printf("%s: %s differs\n", table, what.c_str());
    }
};

// A random number with a random number of bits, or the largest number with that many bits.
std::int64_t random_bits(Random& random, int bits) {
    const auto n = static_cast<int>(random.within(0, bits));
    const std::int64_t most = (std::int64_t{1} << n) - 1;
    return random.within(0, 3) == 0 ? most : n <= 31 ? random.within(0, most) : random.within(0, most >> 31) << 31;
}

template <class T>
std::vector<T> filled(std::size_t count, const auto& make) {
    std::vector<T> v(count);
    for (T& x : v) x = static_cast<T>(make());
    return v;
}

// The arrays of one epilogue. Per-channel constants have the same length as those that the ops allocate.
struct EpilogueCase {
    Epilogue e{};
    Tile tile{};
    AlignedVector<std::int32_t> acc, bias;
    std::vector<std::int32_t> starts, x_zero, x_alpha, x_mult;
    std::vector<std::uint8_t> tables, x;
    AlignedVector<TableLines> lines;
    RequantizationConstants constants;
    std::size_t y_bytes = 0;

    std::string describe() const {
        return "epilogue " + std::to_string(e.kind) + (e.wide ? ", wide" : "") + ", " + std::to_string(tile.rows) +
               " rows, " + std::to_string(tile.valid_columns) + " columns, form " +
               std::to_string(e.requantization.form) + (e.lines != nullptr ? ", lines" : "") +
               (e.low_half    ? ", low half"
                : e.high_half ? ", high half"
                              : "");
    }
};

// Replaces the tables by smooth ones, with slopes of at most 3 per entry and some clamped entries, and sets their other
// form.
void make_lines(Random& random, EpilogueCase& made) {
    made.lines.resize(made.tables.size() / TableLines::LENGTH);
    for (std::size_t i = 0; i < made.lines.size(); ++i) {
        std::uint8_t* table = made.tables.data() + i * TableLines::LENGTH;
        std::int64_t at = 16 * random.within(0, 255), slope = 0;  // in units of 1/16
        for (std::int64_t j = 0; j < TableLines::LENGTH; ++j) {
            if (j % 16 == 0) slope = random.within(-48, 48);
            at = std::clamp<std::int64_t>(at + slope, -100, 4200);
            table[j] = static_cast<std::uint8_t>(std::clamp<std::int64_t>(at / 16, 0, 255));
        }
        if (!make_table_lines(table, made.lines[i])) return;
    }
    made.e.lines = made.lines.data();
}

void make_case(Random& random, EpilogueCase& made) {
    Epilogue& e = made.e;
    e.kind = static_cast<Epilogue::Kind>(random.within(Epilogue::ACC, Epilogue::ADD));
    const bool codes = e.kind != Epilogue::ACC && e.kind != Epilogue::I32;
    const bool wide_codes = codes && random.within(0, 3) == 0;  // LOOKUP: whether the index is u16
    e.wide = e.kind == Epilogue::LOOKUP ? random.within(0, 3) == 0 : wide_codes;
    const std::int64_t widest = random.within(0, 1) == 0 ? 1023 : 65535;
    const bool lines = e.kind == Epilogue::LOOKUP && !e.wide && random.within(0, 1) == 0;
    const std::int64_t last = lines ? 1023 : wide_codes ? random.within(256, widest) : (1 << random.within(1, 8)) - 1;

    Tile& tile = made.tile;
    tile.channel = 8 * random.within(0, 8);
    const bool whole = random.within(0, 1) == 0;
    tile.valid_columns = static_cast<int>(whole ? 32 * random.within(1, 3) : random.within(1, 80));
    tile.columns = tile.valid_columns + static_cast<int>(whole ? 0 : random.within(0, 9));
    tile.rows = static_cast<int>(random.within(1, 14));
    tile.row = random.within(0, 3);
    tile.stride = tile.channel + tile.valid_columns + (whole ? 0 : random.within(0, 9));
    const auto channels = static_cast<std::size_t>(tile.stride), padded = round_up(channels, std::size_t{64});

    const int acc_bits = static_cast<int>(random.within(1, 30));
    const auto signed_acc = [&] { return random_bits(random, acc_bits) * (random.within(0, 1) * 2 - 1); };
    made.acc.resize(static_cast<std::size_t>((tile.rows - 1) * tile.columns + tile.valid_columns));
    for (std::int32_t& a : made.acc) a = static_cast<std::int32_t>(signed_acc());
    made.bias.resize(padded);
    for (std::size_t c = 0; c < channels; ++c) made.bias[c] = static_cast<std::int32_t>(signed_acc());
    tile.acc = made.acc.data(), e.bias = made.bias.data();

    const bool adds = e.kind == Epilogue::ADD;
    const auto least_shift = random.within(1, adds ? 40 : 62);
    const auto most_shift = random.within(least_shift, std::min<std::int64_t>(adds ? 43 : 62, least_shift + 3));
    // ADD: sums of all terms stay below 2^62, as Add proves.
    const int mult_bits = adds ? static_cast<int>(random.within(1, 30)) : 31;
    const auto mults = filled<std::uint32_t>(channels, [&] {
        if (adds) return random_bits(random, mult_bits);
        return random.within(0, 9) == 0 ? random_bits(random, 31) : random.within(std::int64_t{1} << 30, 0x7fffffff);
    });
    const auto shifts = filled<std::uint8_t>(channels, [&] { return random.within(least_shift, most_shift); });
    auto zeros = filled<std::int32_t>(channels, [&] { return e.kind == Epilogue::I32 ? 0 : random.within(0, last); });
    made.constants = RequantizationConstants(mults, shifts, zeros, last, adds ? nullptr : made.bias.data(),
                                             std::int64_t{1} << (acc_bits + 1));
    e.requantization = made.constants.view();

    if (e.kind == Epilogue::LOOKUP) {
        const std::int64_t count = random.within(1, 4), length = last + 1;
        made.tables = filled<std::uint8_t>(static_cast<std::size_t>(count * length * (e.wide ? 2 : 1)),
                                           [&] { return random.within(0, 255); });
        const bool by_channel = random.within(0, 1) == 0;
        made.starts = filled<std::int32_t>(
            channels, [&] { return (by_channel ? random.within(0, count - 1) : count - 1) * length; });
        e.tables = made.tables.data(), e.starts = made.starts.data();
        if (!e.wide && length == TableLines::LENGTH && random.within(0, 2) != 0) make_lines(random, made);
    }
    if (adds) {
        e.residual.type = static_cast<Residual::Type>(random.within(Residual::U8, Residual::I16));
        if (random.within(0, 1) == 0) e.residual.type = Residual::U8;
        const std::size_t size = e.residual.type == Residual::U8 ? 1 : 2;
        const std::int64_t alpha = random.within(0, 3), x_zero = e.residual.type == Residual::U8 ? 255 : 65535;
        made.x = filled<std::uint8_t>(static_cast<std::size_t>((tile.row + tile.rows) * tile.stride) * size,
                                      [&] { return random.within(0, 2) == 0 ? 255 : random.within(0, 255); });
        made.x_zero = filled<std::int32_t>(padded, [&] { return random.within(0, x_zero); });
        made.x_alpha = filled<std::int32_t>(padded, [&] { return random.within(0, alpha); });
        const int x_mult_bits = static_cast<int>(random.within(1, 30));
        made.x_mult = filled<std::int32_t>(padded, [&] { return random_bits(random, x_mult_bits); });
        e.residual.x = made.x.data(), e.residual.zero = made.x_zero.data();
        e.residual.alpha = made.x_alpha.data(), e.residual.mult = made.x_mult.data();
        // As in Add::fill_epilogue.
        const std::int64_t bound = (std::int64_t{1} << (acc_bits + 1 + mult_bits)) +
                                   ((x_zero + 1) << (alpha + x_mult_bits)) + (std::int64_t{1} << (most_shift - 1));
        e.low_half = most_shift <= 32 && (bound >> least_shift) < (std::int64_t{1} << 30);
        e.high_half = least_shift >= 32 && bound < std::int64_t{1} << 62;
    }
    const std::size_t y_size = codes ? (e.wide ? 2 : 1) : 4;
    made.y_bytes = static_cast<std::size_t>((tile.row + tile.rows) * tile.stride) * y_size;
}

void check_epilogue(const Kernels& kernels, Random& random, Tally& tally) {
    EpilogueCase made;
    make_case(random, made);
    constexpr std::size_t GUARD = 64;
    std::vector<std::uint8_t> expected(made.y_bytes + GUARD, POISON), found = expected;
    kernels_scalar()->epilogue(made.e, made.tile, expected.data());
    kernels.epilogue(made.e, made.tile, found.data());
    tally.count(expected == found, kernels.name, made.describe());
}

void check_layernorm(const Kernels& kernels, Random& random, Tally& tally) {
    Norm norm{};
    norm.channels = random.within(0, 2) == 0 ? random.within(1, 70) : 16 * random.within(1, 50);
    norm.wide_in = random.within(0, 3) == 0, norm.wide_out = random.within(0, 3) == 0;
    norm.center = random.within(0, 3) != 0;
    norm.epsilon = 1 + random_bits(random, 30);
    norm.last = norm.wide_out ? 65535 : 255;
    norm.fraction = random.within(0, 9) == 0 ? 20 : 24;
    norm.shift = static_cast<int>(random.within(28, 40));
    const auto channels = static_cast<std::size_t>(norm.channels);
    const bool one_zero = random.within(0, 1) == 0, no_alpha = random.within(0, 1) == 0;
    const std::int64_t largest = norm.wide_in ? 65535 : 255, first_zero = random.within(0, largest);
    // Keeps D (see Norm in kernels.h) below 2^62, even for u16 codes.
    const std::int64_t alphas = no_alpha ? 0 : norm.wide_in && norm.channels > 100 ? 1 : 3;
    const auto zero = filled<std::int32_t>(channels, [&] { return one_zero ? first_zero : random.within(0, largest); });
    const auto alpha = filled<std::int32_t>(channels, [&] { return random.within(0, alphas); });
    AlignedVector<std::int32_t> g(channels);
    AlignedVector<std::int64_t> b(channels);
    // |t| < 2^30 and |g| < 2^31, so |t * g| < 2^61.
    for (std::int32_t& x : g)
        x = static_cast<std::int32_t>(random_bits(random, norm.shift - 22) * (random.within(0, 1) * 2 - 1));
    for (std::int64_t& x : b) x = random.within(-1000, 1000) * (std::int64_t{1} << (norm.shift - 4));
    norm.zero = zero.data(), norm.alpha = alpha.data(), norm.g = g.data(), norm.b = b.data();
    // As in LayerNorm (ops/dense.cpp).
    const std::int64_t v = (largest << alphas) + 1;
    norm.fits_i32 = 2 * v * norm.channels < std::int64_t{1} << 31 && norm.shift >= 32 && norm.fraction == 24;
    const bool i16 = norm.center || !norm.wide_in;
    norm.per_tensor = norm.fits_i32 && norm.channels % 16 == 0 && alphas == 0 && one_zero && i16;
    norm.offset = static_cast<std::int16_t>(!norm.center ? first_zero : norm.wide_in ? -32768 : 0);
    QuickNorm quick;
    std::int64_t most_g = 0, most_b = 0;
    for (const std::int64_t x : g) most_g = std::max(most_g, std::abs(x));
    for (const std::int64_t x : b) most_b = std::max(most_b, std::abs(x));
    quick.set(norm, (most_g << 30) + most_b);

    const std::int64_t rows = random.within(1, 19);
    const auto elements = static_cast<std::size_t>(rows * norm.channels);
    std::vector<std::uint8_t> x(elements * (norm.wide_in ? 2 : 1));
    for (std::int64_t r = 0; r < rows; ++r) {
        const std::int64_t kind = random.within(0, 3), spread = random_bits(random, 8);
        const std::size_t row = x.size() / static_cast<std::size_t>(rows), from = static_cast<std::size_t>(r) * row;
        for (std::size_t i = from; i < from + row; ++i) {
            x[i] = static_cast<std::uint8_t>(kind == 0   ? random.within(0, 255)
                                             : kind == 1 ? random.within(0, 1) * 255
                                             : kind == 2 ? spread
                                                         : random.within(0, spread));
        }
    }
    constexpr std::size_t GUARD = 64;
    std::vector<std::uint8_t> expected(elements * (norm.wide_out ? 2 : 1) + GUARD, POISON), found = expected;
    kernels_scalar()->layernorm(norm, x.data(), expected.data(), rows);
    kernels.layernorm(norm, x.data(), found.data(), rows);
    tally.count(expected == found, kernels.name,
                "layernorm of " + std::to_string(rows) + " x " + std::to_string(norm.channels) +
                    (norm.fits_i32 ? "" : ", not i32") + (norm.quick_g == nullptr ? "" : ", quick") +
                    (norm.per_tensor ? ", per tensor" : "") + (norm.center ? ", centered" : "") +
                    (norm.wide_in ? ", u16" : ""));
}

struct Entry {
    const char* label;
    const Kernels* kernels;
    bool runs;
};

}  // namespace

int main(int argc, char** argv) {
    [[maybe_unused]] const CpuFeatures cpu = cpu_features();
    const Entry entries[] = {
#if defined(__x86_64__) && defined(__GNUC__)
        {"avx2", kernels_avx2(), cpu.avx2},
        {"avx512", kernels_avx512(), cpu.avx2 && cpu.avx512_vnni && cpu.avx512_vbmi},
        {"avx512bw", kernels_avx512bw(), cpu.avx2 && cpu.avx512_vnni},
        {"avx512_shim", kernels_avx512_shim(), true},
        {"avx512bw_shim", kernels_avx512bw_shim(), true},
#endif
        {"neon", kernels_neon(), cpu.neon},
#if defined(__wasm__)
        {"simd128", kernels_simd128(), true},
#endif
        {"scalar", kernels_scalar(), true},
    };
    Tally all;
    for (const Entry& entry : entries) {
        if (argc > 1 &&
            std::none_of(argv + 1, argv + argc, [&](const char* name) { return std::strcmp(name, entry.label) == 0; }))
            continue;
        if (!entry.runs) {
            std::printf("%s: not run, not on this CPU\n", entry.label);
            continue;
        }
        Tally tally;
        Random random(0x9e3779b97f4a7c15ull);
        for (int i = 0; i < 6000; ++i) check_epilogue(*entry.kernels, random, tally);
        for (int i = 0; i < 1500; ++i) check_layernorm(*entry.kernels, random, tally);
        std::printf("%s: %ld passed, %ld failed\n", entry.label, tally.passed, tally.failed);
        all.passed += tally.passed, all.failed += tally.failed;
    }
    std::printf("%ld passed, %ld failed\n", all.passed, all.failed);
    return all.failed == 0 && all.passed > 0 ? 0 : 1;
}
