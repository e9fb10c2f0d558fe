// The loops of RowProduct (kernels.h). Each instruction set compiles them again, so that the compiler vectorizes them.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"

#if defined(__GNUC__)
#define FQVIT_ALWAYS_INLINE __attribute__((always_inline)) inline
#else
#define FQVIT_ALWAYS_INLINE inline
#endif

namespace fqvit::scalar {

template <class B>
FQVIT_ALWAYS_INLINE void multiply_row_of(const RowProduct& p, const B* b, std::int32_t* acc) {
    const std::int64_t inner = p.inner, columns = p.columns;
    const std::int32_t* w = p.w;
    const std::int32_t zero = p.zero;
    if (p.b_rows) {
        for (std::int64_t k = 0; k < inner; ++k) {
            const std::int32_t weight = w[k];
            const B* row = b + k * p.b_stride;
            for (std::int64_t n = 0; n < columns; ++n) acc[n] += weight * (std::int32_t{row[n]} - zero);
        }
        return;
    }
    for (std::int64_t n = 0; n < columns; ++n) {
        const B* row = b + n * p.b_stride;
        std::int32_t sum = 0;
        for (std::int64_t k = 0; k < inner; ++k) sum += w[k] * (std::int32_t{row[k]} - zero);
        acc[n] += sum;
    }
}

FQVIT_ALWAYS_INLINE void multiply_row(const RowProduct& p, std::int32_t* acc) {
    if (p.wide) {
        multiply_row_of(p, static_cast<const std::uint16_t*>(p.b), acc);
    } else {
        multiply_row_of(p, static_cast<const std::uint8_t*>(p.b), acc);
    }
}

}  // namespace fqvit::scalar
