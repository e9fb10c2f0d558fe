#include "detect/header.h"

#include <algorithm>
#include <set>

namespace fqvit {

void Description<DetectorConstants>::check(const DetectorConstants& constants, const Where& where) {
    if (constants.anchors.size() > 16) fail_at(where, "anchors of more than 16 levels");
}

void Description<DetectSettings>::check(const DetectSettings& settings, const Where& where) {
    const std::set<std::int64_t> distinct(settings.categories.begin(), settings.categories.end());
    if (distinct.size() != settings.categories.size()) fail_at(where, "a category occurs twice");
}

DetectorHeader read_detector_header(const std::string& json) {
    const JsonDocument document(json, "the program");
    check_version(document.root());
    DetectorHeader header;
    read_field(document.root(), Where{}, Bounds{}, header);
    const auto check_part = [&](const Header& part) { check_fields(std::min(header.version, part.version), part); };
    check_part(header.pyramid);
    for (const Header& part : header.boxes) check_part(part);
    for (const Header& part : header.masks) check_part(part);
    return header;
}

}  // namespace fqvit
