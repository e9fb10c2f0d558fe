// Infers the shapes of all buffers, op by op, without checking or packing the ops. Rebuilding a program for another
// image size needs these shapes before the engine verifies the result.
#pragma once

#include <functional>
#include <map>
#include <string>

#include "ir/program.h"

namespace fqvit {

using Shapes = std::map<std::string, Shape, std::less<>>;

// Returns the name of the first input of an op.
const std::string& first_input(const OpFields& op);

// Returns the shape of the op's output. shapes: the shapes of the buffers that earlier ops have written. Throws
// BadProgram if an input is missing, but does not check that the shapes of the inputs match.
Shape output_shape(const OpFields& op, const Shapes& shapes, const Constants& constants);

}  // namespace fqvit
