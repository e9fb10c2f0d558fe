#include "detect/part.h"

#include <algorithm>
#include <limits>
#include <map>

#include "core/model.h"

namespace fqvit {
namespace {

constexpr const char* CLASSES = "classes";  // the constant with the class names

Part make_part(std::string name, Header& header, Constants constants) {
    Part part{
        std::move(name), &header, {header.input_shape(), std::move(header.ops), {}, std::move(constants)}, {}, {}};
    for (const Output& output : header.outputs()) part.program.outputs.push_back(output.buffer);
    return part;
}

void verify(Part& part, const std::string& instruction_set) {
    part.weights = std::make_shared<WeightStore>();
    // This engine never runs. The engines for an image size or a batch of RoIs check the memory limit.
    const EngineOptions options{.instruction_set = instruction_set,
                                .max_run_bytes = std::numeric_limits<std::int64_t>::max(),
                                .weights = part.weights};
    with_prefix(part.name, [&] { part.engine = verified_engine(*part.header, part.program, options); });
}

}  // namespace

std::unique_ptr<Engine> verified_engine(const Header& header, const Program& program, const EngineOptions& options) {
    auto engine = std::make_unique<Engine>(program, options);
    check_header(header, *engine, program.constants);
    if (program.constants.contains(CLASSES)) {
        const Constant names = program.constants.read(CLASSES);
        check_classes(header, *engine, std::count(names.bytes.begin(), names.bytes.end(), '\n') + 1);
    }
    return engine;
}

Parts read_parts(DetectorHeader& header, const Constants& constants, const std::string& instruction_set) {
    std::map<std::string, Constants, std::less<>> split{{"pyramid", Constants(constants.source())}};
    const auto name_of = [](std::string kind, std::size_t stage) {
        return kind.append(1, '.') += std::to_string(stage);
    };
    for (std::size_t i = 0; i < header.boxes.size(); ++i) split[name_of("boxes", i)] = Constants(constants.source());
    for (std::size_t i = 0; i < header.masks.size(); ++i) split[name_of("masks", i)] = Constants(constants.source());
    for (const auto& [name, entry] : constants.entries()) {
        const std::size_t slash = name.find('/');
        const auto part = slash == std::string::npos ? split.end() : split.find(name.substr(0, slash));
        require(part != split.end(), "constant '", name, "' belongs to no part of the detector");
        part->second.add(name.substr(slash + 1), entry.dtype, entry.shape, entry.offset);
    }
    const auto read_part = [&](const std::string& name, Header& own) {
        Part part = make_part(name, own, std::move(split.at(name)));
        verify(part, instruction_set);
        return part;
    };
    Parts parts{read_part("pyramid", header.pyramid), {}, {}};
    for (std::size_t i = 0; i < header.boxes.size(); ++i) {
        parts.boxes.push_back(read_part(name_of("boxes", i), header.boxes[i]));
    }
    for (std::size_t i = 0; i < header.masks.size(); ++i) {
        parts.masks.push_back(read_part(name_of("masks", i), header.masks[i]));
    }
    return parts;
}

std::vector<Output> outputs_of(const Header& header, OutputKind kind) {
    std::vector<Output> found;
    for (const Output& output : header.outputs()) {
        if (output.kind == kind) found.push_back(output);
    }
    require(!found.empty(), header.model, ": has no output of kind ", Names<OutputKind>::names[static_cast<int>(kind)],
            ", expected a detector's pyramid or head");
    for (const Output& output : found) {
        require(!output.alpha.has_value(), header.model, ": ", output.buffer,
                " has one scale per channel, expected one per tensor");
    }
    return found;
}

}  // namespace fqvit
