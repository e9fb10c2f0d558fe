// Epilogue and LayerNorm as plain loops in 64-bit integers. kernels.h has the formulas.
//
// Exact because the ops prove when they are loaded that every sum fits in 63 bits. Tests also compile this file with
// -mgeneral-regs-only, which rejects floating-point code.
#include "core/codes.h"
#include "core/fixed.h"
#include "kernels/kernels.h"
#include "kernels/scalar/row_product_scalar.h"

namespace fqvit {
namespace {

void epilogue(const Epilogue& e, const Tile& tile, void* y) {
    const Requantization& q = e.requantization;
    for (int r = 0; r < tile.rows; ++r) {
        for (int c = 0; c < tile.valid_columns; ++c) {
            const std::int64_t channel = tile.channel + c, at = (tile.row + r) * tile.stride + channel;
            const std::int64_t acc = std::int64_t{tile.acc[r * tile.columns + c]} + e.bias[channel];
            if (e.kind == Epilogue::ACC) {
                static_cast<std::int32_t*>(y)[at] = static_cast<std::int32_t>(acc);
                continue;
            }
            std::int64_t sum = acc * q.mult[channel];
            if (e.kind == Epilogue::ADD) {
                const Residual& x = e.residual;
                const std::int64_t term = x.type == Residual::I16 ? static_cast<const std::int16_t*>(x.x)[at]
                                                                  : load_code(x.x, x.type == Residual::U16, at);
                sum += (term - x.zero[channel]) * (std::int64_t{1} << x.alpha[channel]) * x.mult[channel];
            }
            const std::int64_t rounded = round_shift(sum, q.shift[channel]);
            if (e.kind == Epilogue::I32) {
                static_cast<std::int32_t*>(y)[at] = static_cast<std::int32_t>(rounded);
                continue;
            }
            std::int64_t code = clamp(rounded + q.zero[channel], q.last);
            if (e.kind == Epilogue::LOOKUP) code = load_code(e.tables, e.wide, e.starts[channel] + code);
            store_code(y, e.wide, at, code);
        }
    }
}

// The proofs of D < 2^62 and t < 2^31 (ops/dense.cpp) imply |C * v| < 2^31 and C * 4^fraction < 2^62.
void layernorm(const Norm& norm, const void* x, void* y, std::int64_t rows) {
    const std::int64_t channels = norm.channels;
    for (std::int64_t r = 0; r < rows; ++r) {
        const auto v = [&](std::int64_t c) {
            const std::int64_t code = load_code(x, norm.wide_in, r * channels + c);
            return (code - norm.zero[c]) * (std::int64_t{1} << norm.alpha[c]);
        };
        std::int64_t m1 = 0, m2 = 0;
        for (std::int64_t c = 0; c < channels; ++c) {
            const std::int64_t value = v(c);
            if (norm.center) m1 += value;
            m2 += value * value;
        }
        const std::int64_t big_d = channels * m2 - m1 * m1 + norm.epsilon;
        const int j = (61 - ilog2(static_cast<std::uint64_t>(big_d))) >> 1;
        const std::int64_t d = isqrt(big_d << 2 * j);
        for (std::int64_t c = 0; c < channels; ++c) {
            const std::int64_t t = round_divide((channels * v(c) - m1) * (std::int64_t{1} << (norm.fraction + j)), d);
            store_code(y, norm.wide_out, r * channels + c, clamp((t * norm.g[c] + norm.b[c]) >> norm.shift, norm.last));
        }
    }
}

std::size_t no_fused_attention(const Attention&) { return 0; }

void multiply_row(const RowProduct& product, std::int32_t* acc) { scalar::multiply_row(product, acc); }

}  // namespace

const Kernels* kernels_scalar() {
    static constexpr Kernels table = {"scalar",           epilogue,     layernorm,          nullptr,
                                      no_fused_attention, multiply_row, &elementwise_scalar};
    return &table;
}

}  // namespace fqvit
