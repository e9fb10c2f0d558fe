// Batches the program of a detector's head: one program that runs several RoIs in larger matrix products. Gives the
// same ops and constants as src/fqvit/detect/batch.py.
#pragma once

#include <cstdint>

#include "core/engine.h"
#include "ir/header.h"

namespace fqvit {

// Returns the program for `count` RoIs, whose outputs are those of the RoIs one after the other. head: an engine of the
// program, which has verified it. header: the header of the program; the kinds of its outputs are changed. The
// caller verifies the result.
Program batched(const Program& program, const Engine& head, std::int64_t count, Header& header);

// Returns the smallest batch with 64 rows per matrix product: weights are read once per tile of 4 to 14 rows, and few
// tiles should be partial. This is many RoIs for fully connected layers and one RoI for convolutions.
std::int64_t rois_per_batch(const Program& program, const Engine& head);

}  // namespace fqvit
