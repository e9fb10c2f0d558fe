// One op of a program as the caller passes it: plain numbers and arrays, not yet checked.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fqvit/value.h"

namespace fqvit {

// A constant. `data` belongs to the caller and is read only during the call that receives it.
struct Array {
    DType dtype;
    Shape shape;
    const void* data;
};

// docs/reference/engine-records.md lists the integers and arrays of each tag, in order.
struct Record {
    std::string tag;
    std::vector<std::int64_t> inputs;  // numbers of values: buffers and constants
    std::vector<std::int64_t> ints;
    std::vector<Array> arrays;
};

}  // namespace fqvit
