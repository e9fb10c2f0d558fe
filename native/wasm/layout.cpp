// Checks the layout of the structs of fqvit.h in WebAssembly, where pointers and size_t have 4 bytes: JavaScript reads
// and writes the members by offset. New members are added only at the end, so existing offsets never change.
#include <cstddef>

#include "fqvit.h"

#define FQVIT_AT(type, member, offset) static_assert(offsetof(type, member) == (offset))

FQVIT_AT(fqvit_options, struct_size, 0);
FQVIT_AT(fqvit_options, threads, 4);
FQVIT_AT(fqvit_options, instruction_set, 8);
FQVIT_AT(fqvit_options, max_run_bytes, 16);
static_assert(sizeof(fqvit_options) == 24);

FQVIT_AT(fqvit_tensor, name, 0);
FQVIT_AT(fqvit_tensor, kind, 4);
FQVIT_AT(fqvit_tensor, dtype, 8);
FQVIT_AT(fqvit_tensor, axes, 12);
FQVIT_AT(fqvit_tensor, shape, 16);
FQVIT_AT(fqvit_tensor, bytes, 80);
FQVIT_AT(fqvit_tensor, scale, 88);
FQVIT_AT(fqvit_tensor, zero_point, 96);
FQVIT_AT(fqvit_tensor, alpha, 104);
FQVIT_AT(fqvit_tensor, output_name, 108);
static_assert(sizeof(fqvit_tensor) == 112);

FQVIT_AT(fqvit_image, pixels, 0);
FQVIT_AT(fqvit_image, width, 4);
FQVIT_AT(fqvit_image, height, 8);
FQVIT_AT(fqvit_image, channels, 12);
FQVIT_AT(fqvit_image, stride, 16);
static_assert(sizeof(fqvit_image) == 24);

FQVIT_AT(fqvit_description, model, 0);
FQVIT_AT(fqvit_description, source, 4);
FQVIT_AT(fqvit_description, recipe, 8);
FQVIT_AT(fqvit_description, header, 12);
FQVIT_AT(fqvit_description, fingerprint, 16);
FQVIT_AT(fqvit_description, instruction_set, 20);
FQVIT_AT(fqvit_description, threads, 24);
FQVIT_AT(fqvit_description, outputs, 28);
FQVIT_AT(fqvit_description, classes, 32);
FQVIT_AT(fqvit_description, calibration_images, 40);
FQVIT_AT(fqvit_description, weight_bytes, 48);
FQVIT_AT(fqvit_description, run_bytes, 56);
FQVIT_AT(fqvit_description, resize, 64);
FQVIT_AT(fqvit_description, interpolation, 68);
FQVIT_AT(fqvit_description, squash, 72);
FQVIT_AT(fqvit_description, macs, 80);
static_assert(sizeof(fqvit_description) == 88);

FQVIT_AT(fqvit_detector_description, model, 0);
FQVIT_AT(fqvit_detector_description, source, 4);
FQVIT_AT(fqvit_detector_description, recipe, 8);
FQVIT_AT(fqvit_detector_description, header, 12);
FQVIT_AT(fqvit_detector_description, fingerprint, 16);
FQVIT_AT(fqvit_detector_description, instruction_set, 20);
FQVIT_AT(fqvit_detector_description, threads, 24);
FQVIT_AT(fqvit_detector_description, classes, 28);
FQVIT_AT(fqvit_detector_description, stages, 32);
FQVIT_AT(fqvit_detector_description, calibration_images, 40);
FQVIT_AT(fqvit_detector_description, short_side, 48);
FQVIT_AT(fqvit_detector_description, long_side, 52);
FQVIT_AT(fqvit_detector_description, resize, 56);
FQVIT_AT(fqvit_detector_description, max_detections, 60);
FQVIT_AT(fqvit_detector_description, mask_side, 64);
static_assert(sizeof(fqvit_detector_description) == 72);

FQVIT_AT(fqvit_detection, box, 0);
FQVIT_AT(fqvit_detection, score, 32);
FQVIT_AT(fqvit_detection, label, 40);
FQVIT_AT(fqvit_detection, category, 48);
FQVIT_AT(fqvit_detection, probabilities, 56);
static_assert(sizeof(fqvit_detection) == 64);
