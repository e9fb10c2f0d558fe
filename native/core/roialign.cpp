// RoIAlign: checks of the limits, the weights of a box, and the choice of kernel and threads.
#include "core/roialign.h"

#include "core/cpu.h"
#include "core/dispatch.h"
#include "core/thread_pool.h"
#include "core/value.h"
#include "kernels/roialign.h"

namespace fqvit {
namespace {

void require_range(const char* name, std::int64_t value, std::int64_t lo, std::int64_t hi) {
    require(value >= lo && value <= hi, "roi_align: ", name, " is ", value, ", expected ", lo, " to ", hi);
}

}  // namespace

void check_roi_align(const RoiAlign& a) {
    constexpr std::int64_t MAX_CODE = 255;
    require_range("height", a.height, 1, RoiAlign::MAX_CELLS);
    require_range("width", a.width, 1, RoiAlign::MAX_CELLS);
    require(a.channels >= 1, "roi_align: channels is ", a.channels, ", expected 1 or more");
    require_range("side", a.side, 1, RoiAlign::MAX_SIDE);
    require_range("cell", a.cell, RoiAlign::MIN_CELL, RoiAlign::MAX_CELL);
    require_range("zero", a.zero, 0, MAX_CODE);
    require_range("head_zero", a.head_zero, 0, MAX_CODE);
    require_range("last", a.last, 0, MAX_CODE);
    require_range("mult", a.mult, 0, (std::int64_t{1} << 31) - 1);
    require_range("shift", a.shift, 1, 62);
    for (std::int64_t i = 0; i < 4 * a.count; ++i) {
        require_range("an edge of a box", a.boxes[i], -RoiAlign::MAX_EDGE, RoiAlign::MAX_EDGE);
    }
}

RoiAlignScratch::RoiAlignScratch(const RoiAlign& a)
    : numerators(static_cast<std::size_t>(std::max(a.height, a.width))),
      strip(static_cast<std::size_t>(a.width * a.channels + 16)),
      sums(static_cast<std::size_t>(a.channels)) {
    const auto bins = static_cast<std::size_t>(a.side);
    for (Axis* axis : {&rows, &columns}) axis->begin.resize(bins), axis->end.resize(bins);
    rows.weights.resize(bins * static_cast<std::size_t>(a.height));
    columns.weights.resize(bins * static_cast<std::size_t>(a.width));
}

void find_weights(std::int64_t low, std::int64_t high, std::int64_t cell, std::int64_t bins, std::int64_t size,
                  std::vector<std::int64_t>& numerators, RoiAlignScratch::Axis& axis) {
    const std::int64_t samples = -floor_divide(low - high, bins * cell);
    std::fill(axis.begin.begin(), axis.begin.end(), 0);
    std::fill(axis.end.begin(), axis.end.end(), 0);
    if (samples <= 0) return;
    const std::int64_t parts = 2 * samples * bins, whole = cell * parts;
    const std::int64_t start = (low - cell / 2) * parts;
    for (std::int64_t bin = 0; bin < bins; ++bin) {
        std::int64_t begin = 0, end = 0;  // range of cells of the samples so far; positions of samples increase
        for (std::int64_t k = bin * samples; k < (bin + 1) * samples; ++k) {
            const std::int64_t position = start + (2 * k + 1) * (high - low);
            if (position < -whole || position > size * whole) continue;
            const std::int64_t inside = std::clamp<std::int64_t>(position, 0, (size - 1) * whole);
            const std::int64_t first = inside / whole, next = std::min(first + 1, size - 1);
            const std::int64_t fraction = inside - first * whole;
            if (end == 0) begin = end = first;
            while (end <= next) numerators[static_cast<std::size_t>(end++)] = 0;
            numerators[static_cast<std::size_t>(first)] += whole - fraction;
            numerators[static_cast<std::size_t>(next)] += fraction;
        }
        axis.begin[static_cast<std::size_t>(bin)] = begin;
        axis.end[static_cast<std::size_t>(bin)] = end;
        for (std::int64_t i = begin; i < end; ++i) {
            const std::int64_t numerator = numerators[static_cast<std::size_t>(i)] * (1 << 15);
            axis.weights[static_cast<std::size_t>(bin * size + i)] =
                static_cast<std::int32_t>(round_divide(numerator, whole * samples));
        }
    }
}

void align_boxes_scalar(const RoiAlign& a, std::int64_t begin, std::int64_t end, RoiAlignScratch& scratch) {
    align_boxes(a, begin, end, scratch);
}

void roi_align(const RoiAlign& a, ThreadPool& pool, const std::string& instruction_set) {
    const bool scalar = std::string(select_kernels(instruction_set).name) == "scalar";
    std::vector<RoiAlignScratch> scratch(static_cast<std::size_t>(pool.threads()), RoiAlignScratch(a));
    const CpuFeatures cpu = scalar ? CpuFeatures() : cpu_features();
    const auto align = cpu.avx2 ? align_boxes_avx2 : cpu.neon ? align_boxes_neon : align_boxes_scalar;
    pool.run(a.count, 4, [&](int thread, std::int64_t begin, std::int64_t end) {
        align(a, begin, end, scratch[static_cast<std::size_t>(thread)]);
    });
}

void roi_align(const RoiAlign& a, int threads, const std::string& instruction_set) {
    ThreadPool pool(static_cast<int>(std::clamp<std::int64_t>(a.count, 1, std::clamp(threads, 1, 256))));
    roi_align(a, pool, instruction_set);
}

}  // namespace fqvit
