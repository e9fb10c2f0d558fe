// The networks of a detector, read from its file and verified one by one.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/engine.h"
#include "detect/header.h"
#include "ops/weights.h"

namespace fqvit {

struct Part {
    std::string name;      // the prefix of its constants: pyramid, boxes.0, ...
    const Header* header;  // without ops, which are in `program`
    Program program;
    std::shared_ptr<WeightStore> weights;  // packed by the engine, for further engines of the same part
    std::unique_ptr<Engine> engine;        // knows the Value of every buffer; not meant to run

    const Value& value(const std::string& buffer) const { return engine->value(engine->find(buffer)); }
};

// The networks in the order of the file.
struct Parts {
    Part pyramid;
    std::vector<Part> boxes, masks;
};

// Calls action(); adds the prefix to the message of an error about the program.
template <class Action>
void with_prefix(const std::string& prefix, const Action& action) {
    try {
        action();
    } catch (const BadFile&) {
        throw;
    } catch (const BadProgramWithRemedy& error) {
        throw BadProgramWithRemedy(prefix + ": " + error.what());
    } catch (const BadProgram& error) {
        throw BadProgram(prefix + ": " + error.what());
    }
}

// Verifies a program with its header and returns the engine. The rules are those of Program.verify in ir/program.py.
std::unique_ptr<Engine> verified_engine(const Header& header, const Program& program, const EngineOptions& options);

// Assigns the constants, whose names have the form PART/NAME, to the parts, and verifies every part. Moves the ops out
// of the header.
Parts read_parts(DetectorHeader& header, const Constants& constants, const std::string& instruction_set);

// Checks that the parts fit together, with the rules of DetectorProgram.verify in detect/program.py.
void check_detector(const DetectorHeader& header, const Parts& parts);

// Checks that the maps of every level have the image size divided by the level's stride, rounded up.
void check_grids(const Header& header, const Engine& pyramid, const std::vector<std::int64_t>& strides);

// The outputs of this kind, in order. Throws BadProgram if there is none or one has per-channel scales.
std::vector<Output> outputs_of(const Header& header, OutputKind kind);

}  // namespace fqvit
