#include "detect/head.h"

#include <algorithm>

#include "core/memory_size.h"
#include "detect/batch_program.h"

namespace fqvit {
namespace {

constexpr std::int64_t BOXES_AT_ONCE = 256;
constexpr std::int64_t BYTES_AT_ONCE = std::int64_t{16} << 20;  // limit for the features and outputs of these boxes

}  // namespace

Head::Head(const Part& part, const std::vector<Output>& maps, const std::vector<Ratio>& ratios,
           const DetectorConstants& constants, const Shared& shared)
    : name_(part.name),
      shared_(shared),
      side_(part.program.input[0]),
      channels_(part.program.input[2]),
      areas_(constants.areas) {
    const CodeInput& input = *part.header->input;
    for (std::size_t i = 0; i < maps.size(); ++i) {
        align_.push_back({.map = nullptr,
                          .height = 1,
                          .width = 1,
                          .channels = channels_,
                          .zero = static_cast<std::int32_t>(maps[i].zero),
                          .boxes = nullptr,
                          .count = 0,
                          .side = side_,
                          .cell = constants.strides[i] << BOX_FRACTION,
                          .mult = ratios[i].mult,
                          .shift = static_cast<int>(ratios[i].shift),
                          .head_zero = static_cast<std::int32_t>(input.zero),
                          .last = (1 << input.bits) - 1,
                          .y = nullptr});
    }
    with_prefix(part.name, [&] {
        Header header = *part.header;
        batch_ = rois_per_batch(part.program, *part.engine);
        const Program program = batched(part.program, *part.engine, batch_, header);
        engine_ = verified_engine(header, program,
                                  {.instruction_set = shared_.instruction_set,
                                   .weights = part.weights,
                                   .pool = shared_.pool,
                                   .memory = shared_.memory});
    });
    std::int64_t bytes = side_ * side_ * channels_;
    for (const std::string& name : part.program.outputs) {
        counts_.push_back(part.value(name).count());
        bytes += counts_.back() * static_cast<std::int64_t>(sizeof(std::int32_t));
    }
    at_once_ = round_up(std::clamp<std::int64_t>(BYTES_AT_ONCE / bytes, 1, BOXES_AT_ONCE), batch_);
    outputs_.resize(counts_.size());
}

void Head::pool_features(const std::vector<LevelMap>& maps, const Box* boxes, std::int64_t count) {
    std::vector<std::vector<std::int64_t>> edges(maps.size()), places(maps.size());
    for (std::int64_t n = 0; n < count; ++n) {
        // areas_ holds thresholds in ascending order. The level is the number of them that the box's area reaches.
        const auto level = std::upper_bound(areas_.begin(), areas_.end(), area(boxes[n])) - areas_.begin();
        const auto at = static_cast<std::size_t>(level);
        edges[at].insert(edges[at].end(), boxes[n].begin(), boxes[n].end());
        places[at].push_back(n);
    }
    for (std::size_t i = 0; i < maps.size(); ++i) {
        if (places[i].empty()) continue;
        RoiAlign a = align_[i];
        a.map = maps[i].codes, a.height = maps[i].height, a.width = maps[i].width;
        a.boxes = edges[i].data(), a.places = places[i].data();
        a.count = static_cast<std::int64_t>(places[i].size());
        a.y = features_.data();
        check_roi_align(a);
        roi_align(a, *shared_.pool, shared_.instruction_set);
    }
}

void Head::run_some(const std::vector<LevelMap>& maps, const Box* boxes, std::int64_t count, const OpDone& done) {
    const std::int64_t batches = (count + batch_ - 1) / batch_, rois = batches * batch_;
    // The last batch is padded with zero features, whose outputs are not used.
    features_.assign(memory_size(rois * side_ * side_ * channels_), 0);
    pool_features(maps, boxes, count);
    if (done) done(name_, "roi_align", 0);
    std::vector<std::uint8_t*> ys;
    for (std::size_t i = 0; i < outputs_.size(); ++i) {
        outputs_[i].resize(memory_size(rois * counts_[i]));
        ys.push_back(reinterpret_cast<std::uint8_t*>(outputs_[i].data()));
    }
    engine_->run_all(features_.data(), batches, ys);
    if (done) done(name_, "head", engine_->macs() * batches);
}

void Head::release() {
    features_ = {};
    for (std::vector<std::int32_t>& output : outputs_) output = {};
}

}  // namespace fqvit
