// The only floating-point arithmetic of preprocessing: + - * / and conversions, each rounded once to double, or to
// float where Pillow stores a float. IEEE 754 defines their results, so they are the same on every platform if the
// compiler neither fuses a product with a sum nor reorders operations. CMakeLists.txt therefore sets -ffp-contract=off.
#include "image/weights.h"

#include <algorithm>
#include <cfloat>
#include <limits>

#ifdef __FAST_MATH__
#error "image/weights.cpp: compiled with -ffast-math, expected IEEE 754 arithmetic"
#endif

namespace fqvit {
namespace {

static_assert(std::numeric_limits<double>::is_iec559 && std::numeric_limits<float>::is_iec559);
static_assert(FLT_EVAL_METHOD == 0 || FLT_EVAL_METHOD == 1, "x87 would round double arithmetic to 80 bits");

double bilinear(double x) { return x < 1.0 ? 1.0 - x : 0.0; }

// The cubic convolution kernel with a = -1/2 (Keys 1981).
double bicubic(double x) {
    if (x < 1.0) return (1.5 * x - 2.5) * x * x + 1.0;
    if (x < 2.0) return (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5;
    return 0.0;
}

struct Filter {
    double (*at)(double distance);  // distance >= 0
    double support;                 // the filter is 0 at this distance and beyond
};

Filter filter_of(Interpolation interpolation) {
    return interpolation == Interpolation::bilinear ? Filter{bilinear, 1.0} : Filter{bicubic, 2.0};
}

// Rounds half away from zero. |weight| is below 2, so the result is below 2^23.
std::int32_t to_fixed(double weight) {
    const double scaled = weight * (1 << WEIGHT_BITS);
    return static_cast<std::int32_t>(scaled < 0.0 ? scaled - 0.5 : scaled + 0.5);
}

// Adds a window without the zeros at its ends. At scale 1 this leaves a single weight of 1.0.
void add_window(Axis& axis, std::int64_t first, const std::vector<double>& weights) {
    const auto offset = static_cast<std::int64_t>(axis.weights.size());
    std::int64_t zeros = 0;
    for (const double weight : weights) {
        const std::int32_t fixed = to_fixed(weight);
        const bool leading = static_cast<std::int64_t>(axis.weights.size()) == offset;
        if (leading && fixed == 0) {
            ++first;
        } else {
            axis.weights.push_back(fixed);
            zeros = fixed == 0 ? zeros + 1 : 0;
        }
    }
    axis.weights.resize(axis.weights.size() - static_cast<std::size_t>(zeros));
    axis.windows.push_back({first, static_cast<std::int64_t>(axis.weights.size()) - offset, offset});
}

// Returns the windows that resize the part low..high of an axis with `size` pixels to `outputs` pixels, for the output
// pixels begin..end-1.
Axis make_axis(const Filter& filter, std::int64_t size, float low, float high, std::int64_t outputs, std::int64_t begin,
               std::int64_t end) {
    // Pillow subtracts floats. The cast rounds the difference on platforms that compute it in double.
    const double scale = static_cast<double>(static_cast<float>(high - low)) / static_cast<double>(outputs);
    const double filter_scale = std::max(scale, 1.0);  // downscaling widens the filter, which is the antialiasing
    const double support = filter.support * filter_scale, inverse = 1.0 / filter_scale;
    Axis axis;
    std::vector<double> weights;
    for (std::int64_t i = begin; i < end; ++i) {
        const double center = static_cast<double>(low) + (static_cast<double>(i) + 0.5) * scale;
        const auto first = std::max<std::int64_t>(static_cast<std::int64_t>(center - support + 0.5), 0);
        const auto last = std::min(static_cast<std::int64_t>(center + support + 0.5), size);
        weights.clear();
        double sum = 0.0;
        for (std::int64_t x = first; x < last; ++x) {
            const double distance = (static_cast<double>(x) - center + 0.5) * inverse;
            weights.push_back(filter.at(distance < 0.0 ? -distance : distance));
            sum += weights.back();
        }
        // The sum is not 0: a pixel lies within 1/2 of the center, and the positive weights outweigh the negative ones.
        for (double& weight : weights) weight /= sum;
        add_window(axis, first, weights);
    }
    return axis;
}

}  // namespace

Axis resize_axis(Interpolation interpolation, std::int64_t size, std::int64_t resized, std::int64_t begin,
                 std::int64_t end) {
    return make_axis(filter_of(interpolation), size, 0.0F, static_cast<float>(size), resized, begin, end);
}

Axis resize_part_of_axis(Interpolation interpolation, std::int64_t size, std::int64_t resized, std::int64_t begin,
                         std::int64_t end) {
    const auto length = static_cast<double>(size);
    const double scale = length / static_cast<double>(resized);
    const auto low = static_cast<float>(static_cast<double>(begin) * scale);
    const auto high = static_cast<float>(std::min(static_cast<double>(end) * scale, length));
    return make_axis(filter_of(interpolation), size, low, high, end - begin, 0, end - begin);
}

}  // namespace fqvit
