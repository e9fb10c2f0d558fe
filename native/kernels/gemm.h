// Exact products of u8 activations and constant i8 weights: acc[m, o] = sum_k x[m, k] * w[o, k] in i32.
//
// Weights are packed once into panels of `columns` outputs. At run time, a block of up to `rows` activation rows is
// packed, and a micro-kernel multiplies it by one panel, which gives a tile of rows x columns accumulators. The
// epilogue (bias, requantization, table, residual sum) is separate, see kernels.h.
//
// One file implements each instruction set; vnni/gemm_vnni.cpp has both VNNI sets. Letters: M rows, K reduction, O
// outputs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace fqvit {

// The weights of one layer, packed for one instruction set.
class PackedWeights {
public:
    virtual ~PackedWeights() = default;
    // Micro-kernel: acc[r * columns + c] = sum_k x[r, k] * w[panel * columns + c, k] for r < rows and all c < columns.
    // Columns past O are 0. `block` was written by Gemm::pack_rows.
    virtual void multiply(std::int64_t panel, const std::uint8_t* block, int rows, std::int32_t* acc) const = 0;
    virtual std::size_t bytes() const = 0;
    // The same product of panels first..last - 1 in K-blocks whose activations fit in the L1 cache. K-block 0 writes
    // the tiles, the others add to them. acc: the tile of the first panel; stride: elements between two tiles
    virtual int k_blocks() const { return 1; }
    virtual void multiply_k_block(int, std::int64_t first, std::int64_t last, const std::uint8_t* block, int rows,
                                  std::int32_t* acc, std::int64_t stride) const {
        for (; first < last; ++first, acc += stride) multiply(first, block, rows, acc);
    }
    // Change the order of the outputs or inputs: new output (or input) i is the old one order[i]. Return false and
    // change nothing if this is not supported.
    virtual bool reorder_outputs(const std::vector<std::int32_t>&) { return false; }
    virtual bool reorder_inputs(const std::vector<std::int32_t>&) { return false; }
};

class Gemm {
public:
    const char* name;
    int rows;     // largest number of rows of a tile
    int columns;  // of a tile and of a panel

    // w: i8 [O, K], row-major; all values -128..127 are allowed, except for relaxed SIMD (gemm_for_weights).
    virtual std::unique_ptr<PackedWeights> pack_weights(const std::int8_t* w, std::int64_t outputs,
                                                        std::int64_t inputs) const = 0;
    // Returns the bytes of a packed block of `rows` activation rows.
    virtual std::size_t block_bytes(std::int64_t inputs) const = 0;
    // Packs a block. x: `count` rows of u8 [K], `stride` bytes apart. block: 64-byte aligned, block_bytes() long.
    virtual void pack_rows(const std::uint8_t* x, std::int64_t stride, int count, std::int64_t inputs,
                           std::uint8_t* block) const = 0;

protected:
    constexpr Gemm(const char* n, int r, int c) : name(n), rows(r), columns(c) {}
    ~Gemm() = default;
};

constexpr int MAX_TILE = 512;  // rows * columns is at most this for every instruction set

// Null if this build does not contain the instruction set. The caller checks cpu_features().
const Gemm* gemm_scalar();
const Gemm* gemm_avx2();
const Gemm* gemm_avx_vnni();
const Gemm* gemm_avx512_vnni();
const Gemm* gemm_avx512_vnni_prefetch();  // for CPUs without VBMI
const Gemm* gemm_neon();
const Gemm* gemm_neon_dotprod();
const Gemm* gemm_neon_i8mm();
const Gemm* gemm_simd128();
const Gemm* gemm_relaxed_simd();  // WebAssembly only; also null if a probe finds its instructions inexact

// Returns the given GEMM if it supports these weights, else gemm_simd128(). w: `count` weights
#if defined(__wasm__)
const Gemm* gemm_for_weights(const Gemm* gemm, const std::int8_t* w, std::int64_t count);
#else
inline const Gemm* gemm_for_weights(const Gemm* gemm, const std::int8_t*, std::int64_t) { return gemm; }
#endif

}  // namespace fqvit
