// A head of a detector, ready to run on any number of RoIs in batches.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/roialign.h"
#include "core/run_memory.h"
#include "core/thread_pool.h"
#include "detect/boxes.h"
#include "detect/part.h"

namespace fqvit {

// The map of one level: u8 [height, width, channels].
struct LevelMap {
    const std::uint8_t* codes;
    std::int64_t height, width;
};

class Head {
public:
    struct Shared {
        std::shared_ptr<ThreadPool> pool;
        std::shared_ptr<RunMemory> memory;  // heads run one after the other
        std::string instruction_set;
    };

    // maps: the pyramid's map outputs, for their zero points
    // ratios: convert RoIAlign sums to the codes of the head's input, one per map
    Head(const Part& part, const std::vector<Output>& maps, const std::vector<Ratio>& ratios,
         const DetectorConstants& constants, const Shared& shared);

    std::int64_t side() const { return side_; }
    std::int64_t output_count(std::size_t output) const { return counts_[output]; }  // elements per RoI

    // Pools the features of the boxes and runs the head on them. Calls visit(n, outputs) for each box in order, with
    // pointers to its outputs. done: called after RoIAlign and after the network
    template <class Visit>
    void run(const std::vector<LevelMap>& maps, const std::vector<Box>& boxes, const OpDone& done, const Visit& visit) {
        for (std::size_t begin = 0; begin < boxes.size(); begin += static_cast<std::size_t>(at_once_)) {
            const std::size_t end = std::min(boxes.size(), begin + static_cast<std::size_t>(at_once_));
            run_some(maps, boxes.data() + begin, static_cast<std::int64_t>(end - begin), done);
            std::vector<const std::int32_t*> outputs(counts_.size());
            for (std::size_t n = begin; n < end; ++n) {
                for (std::size_t i = 0; i < outputs.size(); ++i) {
                    outputs[i] = outputs_[i].data() + static_cast<std::int64_t>(n - begin) * counts_[i];
                }
                visit(n, outputs);
            }
        }
        release();
    }

private:
    void run_some(const std::vector<LevelMap>& maps, const Box* boxes, std::int64_t count, const OpDone& done);
    void pool_features(const std::vector<LevelMap>& maps, const Box* boxes, std::int64_t count);
    void release();

    std::string name_;  // such as boxes.0
    Shared shared_;
    std::int64_t side_, channels_, batch_ = 0, at_once_ = 0;  // at_once: boxes whose features are in memory at once
    std::vector<RoiAlign> align_;                             // per map; its boxes and memory are set before each call
    std::vector<std::int64_t> areas_;
    std::unique_ptr<Engine> engine_;
    std::vector<std::int64_t> counts_;
    std::vector<std::uint8_t> features_;
    std::vector<std::vector<std::int32_t>> outputs_;
};

}  // namespace fqvit
