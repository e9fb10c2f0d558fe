// A detector loaded from a .fqvit file: from decoded pixels to boxes, scores, labels and masks, with integers only.
//
//   Detector detector(open_file("detector.fqvit"), {.threads = 2});
//   const Detections found = detector.detect({pixels, {height, width}, stride});
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/engine.h"
#include "detect/boxes.h"
#include "detect/header.h"
#include "detect/image.h"
#include "ir/source.h"

namespace fqvit {

struct DetectorOptions {
    std::string instruction_set{};  // as in EngineOptions
    int threads = 1;                // clamped to 1..256
    // Limit of the memory for the pyramid's buffers, in bytes. They need 3.6 GB at 8192 x 8192.
    std::int64_t max_run_bytes = std::int64_t{8} << 30;
};

// The detections of one image, best first.
struct Detections {
    ImageSize image;                           // size of the original image
    std::int64_t side, threshold;              // masks: cells per side; lowest probability of a mask pixel, in 2^-30
    std::vector<Box> boxes;                    // in 1/256 pixel of the original image
    std::vector<std::int64_t> scores, labels;  // in 2^-24; class indices from 0
    std::vector<std::int32_t> probabilities;   // [n, side, side] in 2^-15

    std::size_t count() const { return boxes.size(); }
    // Writes the mask of detection i, u8 [image.height, image.width]: 1 for the pixels of the object, else 0.
    void paste(std::size_t i, std::uint8_t* mask) const;
};

// Safe to call from several threads: calls on one detector run one after the other. Results are bit-identical to those
// of src/fqvit/detect/fixed/reference.py, for every number of threads and every instruction set.
class Detector {
public:
    // Reads and verifies everything that the file contains. Does not use the source after loading. Throws BadProgram,
    // or BadFile if the source cannot be read. Every message ends with a remedy, without a full stop.
    Detector(std::shared_ptr<Source> source, const DetectorOptions& options);
    ~Detector();
    Detector(const Detector&) = delete;
    Detector& operator=(const Detector&) = delete;

    // Resizes the image as the file says and detects objects. Throws BadProgram if the image is empty or too large.
    Detections detect(const Image& image);
    // The same for an image that has already been resized. original: the size to which boxes and masks are scaled
    // done: called after each step of the run. tag: an op of the pyramid, or resize, proposals, roi_align, head or
    // detections. name: the buffer that an op of the pyramid wrote, the network of a head, or empty. The steps cover
    // the whole run, so the time between two calls is that of one step.
    Detections detect_resized(const Image& resized, ImageSize original, const OpDone& done = nullptr);

    const DetectorHeader& header() const;  // without ops
    const std::string& json() const;       // the header as it is stored
    const std::string& fingerprint() const;
    std::int64_t classes() const;    // without the background
    std::int64_t mask_side() const;  // probabilities per side of a mask
    const char* instruction_set() const;
    int threads() const;
    std::size_t kept_sizes() const;  // number of image sizes whose programs are in memory

private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace fqvit
