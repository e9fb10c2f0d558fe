// A program as it is stored: ops on named buffers, and their constants. Not checked; Engine's constructor verifies it.
#pragma once

#include <string>
#include <vector>

#include "core/value.h"
#include "ir/constants.h"
#include "ir/op_fields.h"

namespace fqvit {

constexpr const char* INPUT = "pixels";  // the buffer that holds the image

struct Program {
    Shape input;  // height, width and channels; u8
    std::vector<OpFields> ops;
    std::vector<std::string> outputs;  // names of buffers, at least one
    Constants constants;
};

}  // namespace fqvit
