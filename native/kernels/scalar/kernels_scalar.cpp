// The readable kernels: plain loops in 64-bit integers. Also compiled with -mgeneral-regs-only, which refuses any
// float.
#include "kernels/kernels.h"

#include "core/fixed.h"

namespace fqvit {
namespace {

std::int64_t load(const void* x, bool wide, std::int64_t i) {
    return wide ? static_cast<const std::uint16_t*>(x)[i] : static_cast<const std::uint8_t*>(x)[i];
}

void store(void* y, bool wide, std::int64_t i, std::int64_t code) {
    if (wide) {
        static_cast<std::uint16_t*>(y)[i] = static_cast<std::uint16_t>(code);
    } else {
        static_cast<std::uint8_t*>(y)[i] = static_cast<std::uint8_t>(code);
    }
}

void finish(const Epilogue& e, const Tile& tile, void* y) {
    const Rescale& to = e.rescale;
    for (int r = 0; r < tile.rows; ++r) {
        for (int c = 0; c < tile.taken; ++c) {
            const std::int64_t channel = tile.channel + c, at = (tile.row + r) * tile.stride + channel;
            const std::int64_t acc = std::int64_t{tile.acc[r * tile.columns + c]} + e.bias[channel];
            if (e.kind == Epilogue::ACC) {
                static_cast<std::int32_t*>(y)[at] = static_cast<std::int32_t>(acc);
                continue;
            }
            std::int64_t sum = acc * to.mult[channel];
            if (e.kind == Epilogue::ADD) {
                const Residual& x = e.residual;
                // A multiplication, since shifting a negative number left has no meaning before C++20.
                const std::int64_t term = x.type == Residual::I16 ? static_cast<const std::int16_t*>(x.x)[at]
                                                                  : load(x.x, x.type == Residual::U16, at);
                sum += (term - x.zero[channel]) * (std::int64_t{1} << x.alpha[channel]) * x.mult[channel];
            }
            const std::int64_t rounded = round_shift(sum, to.shift[channel]);
            if (e.kind == Epilogue::I32) {
                static_cast<std::int32_t*>(y)[at] = static_cast<std::int32_t>(rounded);
                continue;
            }
            std::int64_t code = clamp(rounded + to.zero[channel], to.last);
            if (e.kind == Epilogue::LOOKUP) code = load(e.tables, e.wide, e.starts[channel] + code);
            store(y, e.wide, at, code);
        }
    }
}

// C <= 2^15 and |C v| < 2^31 are proved by D < 2^62.
void normalize(const Norm& norm, const void* x, void* y, std::int64_t rows) {
    const std::int64_t channels = norm.channels;
    for (std::int64_t r = 0; r < rows; ++r) {
        const auto lifted = [&](std::int64_t c) {
            return (load(x, norm.wide_in, r * channels + c) - norm.zero[c]) * (std::int64_t{1} << norm.alpha[c]);
        };
        std::int64_t m1 = 0, m2 = 0;
        for (std::int64_t c = 0; c < channels; ++c) {
            const std::int64_t v = lifted(c);
            m1 += v;
            m2 += v * v;
        }
        const std::int64_t d = channels * m2 - m1 * m1 + norm.epsilon;
        const int j = (61 - ilog2(static_cast<std::uint64_t>(d))) >> 1;
        const std::int64_t root = isqrt(d << 2 * j);
        for (std::int64_t c = 0; c < channels; ++c) {
            const std::int64_t t = round_divide((channels * lifted(c) - m1) * (std::int64_t{1} << (24 + j)), root);
            store(y, norm.wide_out, r * channels + c, clamp((t * norm.g[c] + norm.b[c]) >> norm.shift, norm.last));
        }
    }
}

std::size_t no_attention(const Attention&) { return 0; }

}  // namespace

const Kernels* kernels_scalar() {
    static constexpr Kernels table = {"scalar", finish, normalize, nullptr, no_attention};
    return &table;
}

}  // namespace fqvit
