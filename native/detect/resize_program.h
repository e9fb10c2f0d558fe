// Rebuilds a pyramid's program for another image size: the same ops and weights with new row indices, regions and
// shapes. The ops and constants are the same as those that src/fqvit/detect/resize.py makes.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "ir/header.h"
#include "ir/program.h"

namespace fqvit {

// How each op depends on the image size, keyed by the name of the buffer that the op writes.
using Moves = std::map<std::string, Move, std::less<>>;

// Returns the program for images of height x width. program: must be verified, but may lack the indices and regions,
// which are replaced. If it has them and was built for this size, they must equal the new ones. The caller verifies the
// result.
Program resized(const Program& program, const Moves& moves, std::int64_t height, std::int64_t width);

// Returns the program without the constants that resized() replaces.
Program without_sized_constants(Program program);

// Whether `again`, the result of resized() at the program's own size, is the same program.
bool is_same_program(const Program& program, const Program& again);

}  // namespace fqvit
