// The micro-kernel of gemm_vnni.cpp, included once per vector width: not a template, because the target attribute
// cannot depend on a template parameter. Needs FQVIT_TARGET, ROWS, and Vector with zero, load, broadcast, dot4 and
// store. Has no #pragma once on purpose.

constexpr int LANES = static_cast<int>(sizeof(Vector) / 4), COLUMNS = 2 * LANES;

FQVIT_TARGET FQVIT_INLINE void add_row(Vector& low, Vector& high, const std::uint8_t* x, const Vector& w_low,
                                       const Vector& w_high) {
    const Vector quad = broadcast(x);
    low = dot4(low, quad, w_low);
    high = dot4(high, quad, w_high);
}

// With `prefetch`, weights are requested this many bytes before they are used.
constexpr int PREFETCH_DISTANCE = 2560;

template <bool prefetch, int... r>
FQVIT_TARGET FQVIT_INLINE void multiply_rows(std::integer_sequence<int, r...>, const std::int8_t* w,
                                             const std::uint8_t* x, std::int64_t quads, std::int32_t* out) {
    Vector low[sizeof...(r)] = {((void)r, zero())...}, high[sizeof...(r)] = {((void)r, zero())...};
    for (; quads > 0; --quads, w += 4 * COLUMNS, x += 4 * ROWS) {
        if constexpr (prefetch) {
            __builtin_prefetch(w + PREFETCH_DISTANCE);
            __builtin_prefetch(w + PREFETCH_DISTANCE + 4 * LANES);
        }
        const Vector w_low = load(w), w_high = load(w + 4 * LANES);
        (add_row(low[r], high[r], x + 4 * r, w_low, w_high), ...);
    }
    (store(out + COLUMNS * r, low[r]), ...);
    (store(out + COLUMNS * r + LANES, high[r]), ...);
}

template <int rows, bool prefetch>
FQVIT_TARGET void multiply_tile(const std::int8_t* w, const std::uint8_t* x, std::int64_t quads, std::int32_t* out) {
    multiply_rows<prefetch>(std::make_integer_sequence<int, rows>(), w, x, quads, out);
}

// Only tiles of ROWS - 2 to ROWS rows have a version with prefetching: images have many rows, in blocks of nearly ROWS.
template <bool prefetch, int... r>
constexpr std::array<MicroKernel, ROWS> by_rows(std::integer_sequence<int, r...>) {
    return {multiply_tile<r + 1, (prefetch && r + 3 >= ROWS)>...};
}

template <bool prefetch>
constexpr std::array<MicroKernel, ROWS> BY_ROWS = by_rows<prefetch>(std::make_integer_sequence<int, ROWS>());
