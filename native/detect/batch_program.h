// Batches the program of a detector's head: builds a program that runs several RoIs (regions of interest) in larger
// matrix products. The ops and constants are the same as those that src/fqvit/detect/batch.py makes.
#pragma once

#include <cstdint>

#include "core/engine.h"
#include "ir/header.h"

namespace fqvit {

// Returns the program for `count` RoIs. Each of its outputs contains that output of every RoI, one RoI after the other.
// head: an engine made from `program`, which has verified it. header: the header of `program`; this function changes
// the kinds of its outputs. The caller verifies the result.
Program batched(const Program& program, const Engine& head, std::int64_t count, Header& header);

// Returns the smallest batch size with at least 64 rows per matrix product: weights are read once per tile of 4 to 14
// rows, and few tiles should be partial. Fully connected layers need many RoIs for this, convolutions only one.
std::int64_t rois_per_batch(const Program& program, const Engine& head);

}  // namespace fqvit
