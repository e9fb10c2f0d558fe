// Products of u8 rows and constant i8 weights, exact: one family an instruction set.
//
// A family packs weights once, packs blocks of `rows` activations, and multiplies a block by a panel of `columns`
// outputs. What follows (bias, requantization, tables, sums) is in kernels.h (Epilogue) and the same for all. Letters:
// M rows, K reduction, O outputs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace fqvit {

// Weights of one layer in a family's own order.
class Packed {
public:
    virtual ~Packed() = default;
    // acc[r * columns + c] = sum_k x[r, k] w[first + c, k] of the rows in `block`, for r < rows and every column of
    // panel `panel` (first = panel * columns; columns past O are 0). `block` was written by pack_rows.
    virtual void multiply(std::int64_t panel, const std::uint8_t* block, int rows, std::int32_t* acc) const = 0;
    virtual std::size_t bytes() const = 0;
    // The same in several passes over K, so that each finds its part of the block in the first cache: pass 0 writes
    // acc, the others add to it.
    virtual int passes() const { return 1; }
    virtual void multiply_pass(int, std::int64_t panel, const std::uint8_t* block, int rows, std::int32_t* acc) const {
        multiply(panel, block, rows, acc);
    }
};

class Gemm {
public:
    const char* name;
    int rows;     // of a block, at most
    int columns;  // of a panel

    // w: i8 [O, K], row-major. The codes are any of -128..127.
    virtual std::unique_ptr<Packed> pack(const std::int8_t* w, std::int64_t outputs, std::int64_t inputs) const = 0;
    // Bytes of a block of K inputs.
    virtual std::size_t block_bytes(std::int64_t inputs) const = 0;
    // x: u8 rows, `stride` bytes apart. block: aligned to 64, block_bytes long.
    virtual void pack_rows(const std::uint8_t* x, std::int64_t stride, int count, std::int64_t inputs,
                           std::uint8_t* block) const = 0;

protected:
    constexpr Gemm(const char* n, int r, int c) : name(n), rows(r), columns(c) {}
    ~Gemm() = default;
};

constexpr int MAX_TILE = 512;  // rows * columns of every family are at most this

// Families that this build has; null where it has none. Only those that cpu_features allows may run.
const Gemm* gemm_scalar();
const Gemm* gemm_avx2();
const Gemm* gemm_avx_vnni();
const Gemm* gemm_avx512_vnni();
const Gemm* gemm_neon_dotprod();

}  // namespace fqvit
