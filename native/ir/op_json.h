// Reads the ops of a program from JSON.
#pragma once

#include "ir/fields.h"
#include "ir/op_fields.h"

namespace fqvit {

void read_field(Json json, const Where& where, const Bounds& bounds, OpFields& out);

// Returns the fields of every op and of "term" as JSON, for tests that compare them with the Python package:
// {tag: {field: {"required": bool, "default": value of an optional field}}}.
std::string list_op_fields();

}  // namespace fqvit
