// Checks that the parts of a detector match each other, the constants and the settings. The rules are those of
// src/fqvit/detect/program.py and fixed/compatibility.py.
#include <algorithm>
#include <set>

#include "detect/part.h"
#include "detect/resize_program.h"

namespace fqvit {
namespace {

constexpr std::int64_t MAX_SCORES = 1 << 25;  // per image, proposals x (classes + 1): all are in memory at once

// Checks the pyramid's outputs; returns the number of channels of its maps.
std::int64_t check_pyramid_outputs(const DetectorConstants& constants, const Part& pyramid) {
    const Header& header = *pyramid.header;
    const std::vector<Output> maps = outputs_of(header, OutputKind::map);
    const std::vector<Output> scores = outputs_of(header, OutputKind::scores);
    const std::vector<Output> deltas = outputs_of(header, OutputKind::deltas);
    const auto size = [](const auto& list) { return static_cast<std::int64_t>(list.size()); };
    const Shape found{size(maps), size(scores), size(deltas)};
    const Shape expected{size(constants.areas) + 1, size(constants.strides), size(constants.strides)};
    require(found == expected, "detector: the pyramid has ", found, " maps, scores and deltas, expected ", expected);
    for (const Output& map : maps) require(map.zero <= 255, "detector: the zero point of a map is above 255");
    const std::int64_t anchors = size(constants.anchors[0]);
    const auto check_channels = [&](const std::vector<Output>& outputs, std::int64_t channels) {
        for (const Output& output : outputs) {
            const Shape& shape = pyramid.value(output.buffer).shape;
            require(shape.size() == 3 && shape[2] == channels, "detector: ", output.buffer, " has shape ", shape,
                    ", expected ", channels, " channels for ", anchors, " anchors");
        }
    };
    check_channels(scores, anchors);
    check_channels(deltas, 4 * anchors);
    const std::int64_t channels = pyramid.value(maps[0].buffer).channels();
    for (const Output& map : maps) {
        require(pyramid.value(map.buffer).channels() == channels, "detector: maps have different numbers of channels");
    }
    return channels;
}

void check_roi_head(const Part& head, std::int64_t channels, const std::vector<OutputKind>& kinds) {
    const Header& header = *head.header;
    require(header.input.has_value(), header.model,
            ": takes pixels, expected a head of a detector, which takes RoI features");
    const Shape shape = header.input_shape();
    require(shape[0] == shape[1] && shape[0] <= MAX_ROI_SIDE && shape[2] == channels, "detector: ", header.model,
            ": takes ", shape, ", expected a square RoI of ", channels, " channels with at most ", MAX_ROI_SIDE,
            " cells per side");
    std::vector<OutputKind> found;
    for (const Output& output : header.outputs()) found.push_back(output.kind);
    require(found == kinds, "detector: ", header.model, ": has different outputs, expected ",
            kinds.size() == 2 ? "logits and deltas" : "scores");
    for (const OutputKind kind : kinds) outputs_of(header, kind);
}

// Checks a box head; returns its number of classes.
std::int64_t check_box_head(const Part& head, std::int64_t channels) {
    check_roi_head(head, channels, {OutputKind::logits, OutputKind::deltas});
    const Shape& logits = head.value(head.header->output.buffer).shape;
    const Shape& deltas = head.value(head.header->others[0].buffer).shape;
    require(deltas.size() == 1, "detector: ", head.header->model, ": deltas of shape ", deltas, ", expected a vector");
    const std::int64_t classes = logits[0] - 1;  // the last logit is the background
    require(classes >= 1 && (deltas[0] == 4 || deltas[0] == 4 * classes), "detector: ", head.header->model, ": ",
            logits[0], " logits and ", deltas[0], " deltas, expected C + 1 logits and 4 or 4 * C deltas for C classes");
    return classes;
}

// Checks a mask head; returns its number of classes.
std::int64_t check_mask_head(const Part& head, std::int64_t channels) {
    check_roi_head(head, channels, {OutputKind::scores});
    const Shape& shape = head.value(head.header->output.buffer).shape;
    const std::int64_t side = 2 * head.program.input[0];
    require(shape[0] == side && shape[1] == side, "detector: ", head.header->model, ": masks of shape ", shape,
            ", expected ", side, " x ", side);
    return shape[2];
}

void check_heads(const DetectorConstants& constants, const Parts& parts, std::int64_t channels) {
    std::set<std::int64_t> classes;
    const auto check = [&](const char* kind, const std::vector<Part>& heads, const auto& check_head) {
        require(heads.size() == constants.stages(), "detector: ", heads.size(), " ", kind, " heads, expected ",
                constants.stages(), ", one per stage");
        for (const Part& head : heads) {
            require(head.program.input == heads[0].program.input, "detector: ", kind,
                    " heads take RoIs of different sizes");
            classes.insert(check_head(head, channels));
        }
    };
    check("box", parts.boxes, check_box_head);
    check("mask", parts.masks, check_mask_head);
    require(classes.size() == 1, "detector: heads have different numbers of classes");
    const std::int64_t scores = constants.proposals * (*classes.begin() + 1);
    require(scores <= MAX_SCORES, "detector: ", scores, " scores per image, expected at most ", MAX_SCORES);
}

void check_pyramid(const Part& pyramid, const std::vector<std::int64_t>& strides) {
    const Header& header = *pyramid.header;
    require(!header.input.has_value() && header.preprocess.channels == 3, "pyramid: does not take colour images");
    check_grids(header, *pyramid.engine, strides);
    const Program& program = pyramid.program;
    bool same = false;
    with_prefix(header.model, [&] {
        same = is_same_program(program, resized(program, header.moves, program.input[0], program.input[1]));
    });
    require(same, "pyramid: resizing it to its own size gives a different program");
}

void check_settings(const DetectSettings& s, const Parts& parts) {
    require(std::max(s.short_side, s.long_side) <= MAX_SIDE, "settings: images of ", s.short_side, " x ", s.long_side,
            ", expected sides of at most ", MAX_SIDE);
    const auto classes = static_cast<std::size_t>(parts.boxes[0].engine->output().channels() - 1);
    const auto check_count = [&](const char* what, std::size_t count) {
        require(count == 0 || count == classes, "settings: ", count, " ", what, " for ", classes, " classes");
    };
    check_count("class names", s.classes.size());
    check_count("categories", s.categories.size());
    const auto check_pixels = [&](const Part& part) {
        const Preprocess& p = part.header->preprocess;
        const bool same = std::equal(s.mean.begin(), s.mean.end(), p.mean.begin(), p.mean.end()) &&
                          std::equal(s.std.begin(), s.std.end(), p.std.begin(), p.std.end());
        require(same, part.name, ": mean or std of pixels differs from the settings");
    };
    check_pixels(parts.pyramid);
    std::for_each(parts.boxes.begin(), parts.boxes.end(), check_pixels);
    std::for_each(parts.masks.begin(), parts.masks.end(), check_pixels);
}

}  // namespace

void check_grids(const Header& header, const Engine& pyramid, const std::vector<std::int64_t>& strides) {
    const Shape& image = pyramid.image().shape;
    for (const OutputKind kind : {OutputKind::map, OutputKind::scores, OutputKind::deltas}) {
        const std::vector<Output> outputs = outputs_of(header, kind);
        for (std::size_t i = 0; i < std::min(outputs.size(), strides.size()); ++i) {
            const Shape& shape = pyramid.value(pyramid.find(outputs[i].buffer)).shape;
            const Shape found(shape.begin(), shape.begin() + 2);
            const Shape grid{(image[0] + strides[i] - 1) / strides[i], (image[1] + strides[i] - 1) / strides[i]};
            require(found == grid, "detector: pyramid: ", outputs[i].buffer, " is ", found, ", expected ", grid,
                    " at stride ", strides[i]);
        }
    }
}

void check_detector(const DetectorHeader& header, const Parts& parts) {
    header.between.check();
    check_heads(header.between, parts, check_pyramid_outputs(header.between, parts.pyramid));
    check_pyramid(parts.pyramid, header.between.strides);
    check_settings(header.settings, parts);
}

}  // namespace fqvit
