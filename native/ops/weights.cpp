#include "ops/weights.h"

#include <algorithm>

namespace fqvit {

WeightSums sum_weights(const std::int8_t* w, std::int64_t inputs) {
    std::int64_t sum = 0, size = 0;
    for (std::int64_t k = 0; k < inputs;) {
        std::int32_t part = 0, part_size = 0;  // 32 bits are enough for 4096 weights and let compilers vectorize
        for (const std::int64_t end = std::min(inputs, k + 4096); k < end; ++k) {
            const std::int32_t weight = w[k];
            part += weight;
            part_size += weight < 0 ? -weight : weight;
        }
        sum += part, size += part_size;
    }
    return {(sum + size) / 2, (sum - size) / 2};
}

}  // namespace fqvit
