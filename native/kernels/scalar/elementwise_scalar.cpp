// Multiply, rotary, depthwise, max and mean as plain loops. elementwise.h has the formulas.
//
// Exact because the ops prove, when they are loaded, that every accumulator is below 2^31.
#include "core/codes.h"
#include "core/fixed.h"
#include "kernels/elementwise.h"

namespace fqvit {
namespace {

void store_requantized(const TensorRequantization& q, std::int64_t acc, void* y, std::int64_t at) {
    store_code(y, q.wide, at, clamp(requantize(acc, q.mult, q.shift) + q.zero, q.last));
}

void multiply(const Product& product, const void* a, const void* b, void* y, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t left = load_code(a, product.wide_a, i) - product.a_zero;
        const std::int64_t right = load_code(b, product.wide_b, i) - product.b_zero;
        store_requantized(product.requantization, left * right, y, i);
    }
}

void rotary(const Rotation& rotation, const std::int32_t* table, const void* x, void* y) {
    const Codes codes{x, rotation.wide_in};
    for (std::int64_t first = 0; first < rotation.channels; first += rotation.period) {
        for (std::int64_t p = 0; p < rotation.period; ++p) {
            const std::int64_t cosine = static_cast<std::int16_t>(table[p]), sine = table[p] >> 16;
            const std::int64_t own = codes[first + p] - rotation.zero;
            const std::int64_t other = codes[first + rotation.partner[p]] - rotation.zero;
            store_requantized(rotation.requantization, own * cosine + other * sine, y, first + p);
        }
    }
}

// The inner loop runs over channels, so that compilers vectorize it.
template <class T>
void add_taps(const Taps& taps, const std::uint8_t* const* rows, std::int32_t* acc) {
    const std::int64_t channels = taps.channels;
    for (std::int64_t c = 0; c < channels; ++c) acc[c] = 0;
    for (std::int64_t pair = 0; pair < taps.pairs; ++pair) {
        const auto* even = reinterpret_cast<const T*>(rows[2 * pair]);
        const auto* odd = reinterpret_cast<const T*>(rows[2 * pair + 1]);
        const std::int32_t* weights = taps.weights + pair * channels;
        for (std::int64_t c = 0; c < channels; ++c) {
            acc[c] += even[c] * static_cast<std::int16_t>(weights[c]) + odd[c] * (weights[c] >> 16);
        }
    }
}

void depthwise(const Taps& taps, const std::uint8_t* const* rows, std::int32_t* acc) {
    (taps.wide_in ? add_taps<std::uint16_t> : add_taps<std::uint8_t>)(taps, rows, acc);
}

void max(const Rows& rows, const void* x, void* y, std::int64_t count) {
    const Codes codes{x, rows.wide_in};
    for (std::int64_t c = 0; c < count; ++c) {
        std::int64_t most = codes[c];
        for (std::int64_t r = 1; r < rows.count; ++r) {
            const std::int64_t code = codes[r * rows.stride + c];
            if (code > most) most = code;
        }
        store_code(y, rows.wide_in, c, most);
    }
}

void mean(const Average& average, const void* x, void* y, std::int64_t channel, std::int64_t count) {
    const Rows& rows = average.rows;
    const Codes codes{x, rows.wide_in};
    for (std::int64_t c = 0; c < count; ++c) {
        std::int64_t acc = 0;
        for (std::int64_t r = 0; r < rows.count; ++r) acc += codes[r * rows.stride + c] - average.zero[channel + c];
        store_requantized(average.requantization, acc * (std::int64_t{1} << average.alpha[channel + c]), y, c);
    }
}

template <class T>
void center_codes(const Centering& centering, const T* x, std::int32_t* acc, std::int64_t channels) {
    for (std::int64_t c = 0; c < channels; ++c) {
        acc[c] = (static_cast<std::int32_t>(x[c]) - centering.zero[c]) * (std::int32_t{1} << centering.alpha[c]);
    }
}

void center(const Centering& centering, const void* x, std::int32_t* acc, std::int64_t channels) {
    if (centering.wide_in) {
        center_codes(centering, static_cast<const std::uint16_t*>(x), acc, channels);
    } else {
        center_codes(centering, static_cast<const std::uint8_t*>(x), acc, channels);
    }
}

}  // namespace

constexpr ElementwiseKernels elementwise_scalar = {multiply, rotary, depthwise, max, mean, center};

}  // namespace fqvit
