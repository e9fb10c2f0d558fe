// Reads the ops of a program from JSON.
#pragma once

#include "ir/fields.h"
#include "ir/op_fields.h"

namespace fqvit {

void read_field(Json json, const Where& where, const Bounds& bounds, OpFields& out);

}  // namespace fqvit
