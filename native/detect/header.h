// The JSON of a detector: settings, the integer constants of the arithmetic between the networks, and one header per
// network. See src/fqvit/detect/program.py, settings.py and fixed/constants.py for the meaning of the fields.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "detect/constants.h"
#include "detect/image.h"
#include "ir/header.h"

namespace fqvit {

template <>
struct Names<ResizeRule> {
    static constexpr const char* names[] = {"rounded", "opencv"};
};

// Only short, long, classes and categories are used at run time; mean and std must be those of the networks.
struct DetectSettings {
    using Four = std::array<double, 4>;
    std::int64_t short_side = 800, long_side = 1333;
    std::array<double, 3> mean{0.485, 0.456, 0.406}, std{0.229, 0.224, 0.225};
    double anchor_scale = 8;
    std::vector<double> anchor_ratios{0.5, 1.0, 2.0};
    std::vector<std::int64_t> strides{4, 8, 16, 32, 64};
    double finest = 56;
    std::int64_t proposals_a_level = 1000, proposals = 1000;
    double proposal_iou = 0.7, score = 0.05, iou = 0.5;
    std::int64_t detections = 100;
    double mask = 0.5;
    std::vector<Four> stds{{0.1, 0.1, 0.2, 0.2}, {0.05, 0.05, 0.1, 0.1}, {0.033, 0.033, 0.067, 0.067}};
    std::vector<std::string> classes{};
    std::vector<std::int64_t> categories{};
};

struct DetectorHeader {
    std::int64_t version = 0;
    std::string model{}, source{};
    DetectSettings settings{};
    DetectorConstants between{};
    Header pyramid{};
    std::vector<Header> boxes{}, masks{};  // one per stage
    ResizeRule resize = ResizeRule::rounded;
};

template <>
struct Description<Ratio> {
    static constexpr bool IS_ARRAY = true;
    static constexpr auto fields() {
        return std::tuple{required<&Ratio::mult>("mult", {.lo = 0, .hi = (std::int64_t{1} << 31) - 1}),
                          required<&Ratio::shift>("shift", {.lo = 1, .hi = 62})};
    }
};

template <>
struct Description<DetectorConstants> {
    static constexpr auto fields() {
        using F = DetectorConstants;
        constexpr Bounds FEW{.shortest = 1, .longest = 16};
        constexpr Bounds SHARE{.lo = 0, .hi = std::int64_t{1} << IOU_FRACTION};
        constexpr Bounds PROPOSALS{.lo = 1, .hi = 10'000};
        return std::tuple{
            required<&F::padding>("padding", {.lo = 0, .hi = 255}),
            required<&F::strides>("strides", {.lo = 1, .hi = 100'000, .shortest = 1, .longest = 16}),
            // The limits on the length apply to the outer and the inner lists; check() limits the outer list to 16.
            required<&F::anchors>("anchors", {.lo = 1, .hi = MAX_SIDE << BOX_FRACTION, .shortest = 1, .longest = 64}),
            required<&F::areas>("areas", {.lo = 0, .hi = (std::int64_t{1} << 62) - 1, .longest = 15}),
            required<&F::objectness>("objectness", FEW), required<&F::deltas>("deltas", FEW),
            required<&F::box_deltas>("box_deltas", FEW),
            required<&F::log_limit>("log_limit", {.lo = 0, .hi = std::int64_t{8} << LOG_FRACTION}),
            required<&F::classes>("classes", FEW), required<&F::mask_logits>("mask_logits", FEW),
            required<&F::box_squares>("box_squares", FEW), required<&F::mask_squares>("mask_squares", FEW),
            required<&F::proposals_a_level>("proposals_a_level", PROPOSALS),
            required<&F::proposals>("proposals", PROPOSALS), required<&F::proposal_iou>("proposal_iou", SHARE),
            required<&F::score>("score", {.lo = 0, .hi = std::int64_t{1} << SCORE_FRACTION}),
            required<&F::iou>("iou", SHARE), required<&F::detections>("detections", {.lo = 1, .hi = 1'000}),
            required<&F::mask>("mask", {.lo = 0, .hi = std::int64_t{1} << 2 * MASK_FRACTION})};
    }
    static void check(const DetectorConstants& constants, const Where& where);
};

template <>
struct Description<DetectSettings> {
    static constexpr auto fields() {
        using F = DetectSettings;
        constexpr Bounds COUNT{.lo = 1, .hi = 100'000};
        constexpr Bounds POSITIVE{.least = 1e-6, .most = 1e6}, SHARE{.least = 0, .most = 1};
        constexpr Bounds PROPOSALS{.lo = 1, .hi = 10'000};
        return std::tuple{optional<&F::short_side>("short", COUNT),
                          optional<&F::long_side>("long", COUNT),
                          optional<&F::mean>("mean", {.least = -1e6, .most = 1e6}),
                          optional<&F::std>("std", POSITIVE),
                          optional<&F::anchor_scale>("anchor_scale", POSITIVE),
                          optional<&F::anchor_ratios>("anchor_ratios", POSITIVE),
                          optional<&F::strides>("strides", COUNT),
                          optional<&F::finest>("finest", {.least = 1e-6, .most = 8192}),
                          optional<&F::proposals_a_level>("proposals_a_level", PROPOSALS),
                          optional<&F::proposals>("proposals", PROPOSALS),
                          optional<&F::proposal_iou>("proposal_iou", SHARE),
                          optional<&F::score>("score", SHARE),
                          optional<&F::iou>("iou", SHARE),
                          optional<&F::detections>("detections", {.lo = 1, .hi = 1'000}),
                          optional<&F::mask>("mask", SHARE),
                          optional<&F::stds>("stds", POSITIVE),
                          optional<&F::classes>("classes"),
                          optional<&F::categories>("categories")};
    }
    static void check(const DetectSettings& settings, const Where& where);
};

template <>
struct Description<DetectorHeader> {
    static constexpr auto fields() {
        using F = DetectorHeader;
        return std::tuple{
            required<&F::version>("version"),   required<&F::model>("model"),     required<&F::source>("source"),
            required<&F::settings>("settings"), required<&F::between>("between"), required<&F::pyramid>("pyramid"),
            required<&F::boxes>("boxes"),       required<&F::masks>("masks"),     optional<&F::resize>("resize")};
    }
};

// Reads the JSON of a detector.
DetectorHeader read_detector_header(const std::string& json);

}  // namespace fqvit
