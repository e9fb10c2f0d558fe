// The NEON kernels that the tables in kernels_neon.cpp use and other files define. AArch64 only.
#pragma once

#include "kernels/kernels.h"

namespace fqvit {

void layernorm_neon(const Norm& norm, const void* x, void* y, std::int64_t rows);

// The micro-kernel of attention: out[r][c] = sum_k a[r][k] * b[c][k] modulo 2^32 for 16 columns and `rows` rows. If
// `low`, another matrix like a, is not null, the result is 2^8 * (result for a) + (result for low).
//   a, low: u8, rows `stride` bytes apart   b: u8 [chunks * 4][16][4], groups of four k   chunks: K / 16
using AttentionTile = void (*)(const std::uint8_t* a, const std::uint8_t* low, std::int64_t stride,
                               const std::uint8_t* b, std::int64_t chunks, std::uint32_t* out);
constexpr int ATTENTION_ROWS = 4, ATTENTION_COLUMNS = 16;

struct AttentionTiles {
    AttentionTile by_rows[ATTENTION_ROWS + 1];  // [0] is null
};
const AttentionTiles& attention_tiles_neon();
const AttentionTiles* attention_tiles_neon_dotprod();  // null if this build does not contain them

void attention_neon(const Attention&, const std::uint8_t* q, const std::uint8_t* k, const std::uint8_t* v,
                    const std::int32_t* bias, const std::uint8_t* region, std::uint8_t* y, std::uint8_t* scratch);
void attention_neon_dotprod(const Attention&, const std::uint8_t* q, const std::uint8_t* k, const std::uint8_t* v,
                            const std::int32_t* bias, const std::uint8_t* region, std::uint8_t* y,
                            std::uint8_t* scratch);
std::size_t attention_scratch_neon(const Attention&);

}  // namespace fqvit
