// The part of the C API for detectors. include/fqvit.h documents every function.
#include "detect/detector.h"

#include "capi/handles.h"
#include "capi/text.h"
#include "core/memory_size.h"
#include "image/preprocess.h"

using namespace fqvit;
using namespace fqvit::capi;

struct fqvit_detector {
    fqvit_detector(std::shared_ptr<Source> source, const DetectorOptions& options)
        : detector(std::move(source), options) {
        for (const std::string& name : detector.header().settings.classes) classes.push_back(valid_utf8(name));
    }

    Detector detector;
    std::vector<std::string> classes;
};

struct fqvit_detections {
    Detections found;
    std::vector<std::int64_t> categories;  // one per detection
};

namespace {

template <class Handle>
Handles<Handle>& handles() {
    static auto* const live = new Handles<Handle>;  // never destroyed: other threads may run at exit
    return *live;
}

Detector& detector_of(const fqvit_detector* handle) {
    handles<fqvit_detector>().require(handle);
    return const_cast<fqvit_detector*>(handle)->detector;
}

const Detections& detections_of(const fqvit_detections* handle, std::size_t i) {
    handles<fqvit_detections>().require(handle);
    require_argument(i < handle->found.count(), "detection: index " + std::to_string(i) + ", expected less than " +
                                                    std::to_string(handle->found.count()));
    return handle->found;
}

DetectorOptions read_detector_options(const fqvit_options* given) {
    DetectorOptions out;
    const EngineOptions options = read_options(given, out.max_run_bytes);
    return {options.instruction_set, options.threads, options.max_run_bytes};
}

// Registers a new handle and returns it to the caller.
template <class Handle>
fqvit_status create(Handle** handle, const auto& make) {
    return guarded([&] {
        require_argument(handle != nullptr, "handle: null, expected the address of a handle");
        *handle = nullptr;
        std::unique_ptr<Handle> made = make();
        handles<Handle>().add(made.get());
        *handle = made.release();
    });
}

void check_image(const fqvit_image* image) {
    require_argument(image != nullptr && image->pixels != nullptr, "image: null, expected pixels");
    const auto fits = [](std::uint32_t side) { return side >= 1 && side <= Preprocess::MAX_IMAGE_SIDE; };
    require_argument(fits(image->width) && fits(image->height),
                     "image of " + std::to_string(image->height) + " x " + std::to_string(image->width) +
                         ": expected sides of 1 to " + std::to_string(Preprocess::MAX_IMAGE_SIDE));
    require_argument(image->channels == 1 || image->channels == 3 || image->channels == 4,
                     "image: " + std::to_string(image->channels) + " channels, expected 1, 3 or 4");
    const std::uint64_t row = std::uint64_t{image->width} * image->channels;
    require_argument(image->stride == 0 || (image->stride >= row && image->stride <= Preprocess::MAX_IMAGE_STRIDE),
                     "image: a stride of " + std::to_string(image->stride) + ", expected " + std::to_string(row) +
                         " to " + std::to_string(Preprocess::MAX_IMAGE_STRIDE));
}

// Returns the image as RGB. buffer: memory for the pixels if they must be converted
Image to_rgb(const fqvit_image& image, std::vector<std::uint8_t>& buffer) {
    const std::int64_t width = image.width, height = image.height, channels = image.channels;
    const std::int64_t stride = image.stride == 0 ? width * channels : static_cast<std::int64_t>(image.stride);
    if (channels == 3) return {image.pixels, {height, width}, stride};
    buffer.reserve(memory_size(3 * width * height));
    for (std::int64_t y = 0; y < height; ++y) {
        const std::uint8_t* pixel = image.pixels + y * stride;
        for (std::int64_t x = 0; x < width; ++x, pixel += channels) {
            for (std::int64_t c = 0; c < 3; ++c) buffer.push_back(pixel[channels == 1 ? 0 : c]);
        }
    }
    return {buffer.data(), {height, width}, 3 * width};
}

}  // namespace

extern "C" {

fqvit_status fqvit_detector_load(const char* path, const fqvit_options* options, fqvit_detector** detector) {
    return create(detector, [&] {
        require_argument(path != nullptr, "path: null, expected the name of a file");
        const DetectorOptions checked = read_detector_options(options);
        std::unique_ptr<fqvit_detector> made;
        with_path(path, [&] { made = std::make_unique<fqvit_detector>(open_file(path), checked); });
        return made;
    });
}

fqvit_status fqvit_detector_load_memory(const void* data, size_t size, const fqvit_options* options,
                                        fqvit_detector** detector) {
    return create(detector, [&] {
        require_argument(data != nullptr, "data: null, expected the bytes of a file");
        return std::make_unique<fqvit_detector>(borrow_memory(data, size), read_detector_options(options));
    });
}

void fqvit_detector_free(fqvit_detector* detector) {
    if (handles<fqvit_detector>().remove(detector)) delete detector;
}

fqvit_status fqvit_detector_describe(const fqvit_detector* handle, fqvit_detector_description* description,
                                     size_t size) {
    return guarded([&] {
        const Detector& detector = detector_of(handle);
        const DetectorHeader& header = detector.header();
        fqvit_detector_description out{};
        out.model = header.model.c_str(), out.source = header.source.c_str();
        out.recipe = header.pyramid.recipe.text.c_str(), out.header = detector.json().c_str();
        out.fingerprint = detector.fingerprint().c_str();
        out.instruction_set = detector.instruction_set();
        out.threads = static_cast<std::uint32_t>(detector.threads());
        out.classes = static_cast<std::uint32_t>(detector.classes());
        out.stages = static_cast<std::uint32_t>(header.between.stages());
        out.calibration_images = static_cast<std::uint64_t>(std::max<std::int64_t>(header.pyramid.images, 0));
        out.short_side = static_cast<std::uint32_t>(header.settings.short_side);
        out.long_side = static_cast<std::uint32_t>(header.settings.long_side);
        out.resize = Names<ResizeRule>::names[static_cast<std::size_t>(header.resize)];
        out.max_detections = static_cast<std::uint32_t>(header.between.detections);
        out.mask_side = static_cast<std::uint32_t>(detector.mask_side());
        copy_known(out, description, size);
    });
}

const char* fqvit_detector_class_name(const fqvit_detector* handle, uint32_t i) {
    const char* name = nullptr;
    static_cast<void>(guarded([&] {
        detector_of(handle);
        if (i < handle->classes.size()) name = handle->classes[i].c_str();
    }));
    return name;
}

fqvit_status fqvit_detector_detect(fqvit_detector* handle, const fqvit_image* image, fqvit_detections** found) {
    return create(found, [&] {
        Detector& detector = detector_of(handle);
        check_image(image);
        std::vector<std::uint8_t> buffer;
        auto out = std::make_unique<fqvit_detections>();
        out->found = detector.detect(to_rgb(*image, buffer));
        const std::vector<std::int64_t>& categories = detector.header().settings.categories;
        for (const std::int64_t label : out->found.labels) {
            out->categories.push_back(categories.empty() ? label + 1 : categories[static_cast<std::size_t>(label)]);
        }
        return out;
    });
}

size_t fqvit_detections_count(const fqvit_detections* handle) {
    size_t count = 0;
    static_cast<void>(guarded([&] {
        handles<fqvit_detections>().require(handle);
        count = handle->found.count();
    }));
    return count;
}

fqvit_status fqvit_detections_get(const fqvit_detections* handle, size_t i, fqvit_detection* detection, size_t size) {
    return guarded([&] {
        const Detections& found = detections_of(handle, i);
        fqvit_detection out{};
        std::copy(found.boxes[i].begin(), found.boxes[i].end(), out.box);
        out.score = found.scores[i], out.label = found.labels[i], out.category = handle->categories[i];
        out.probabilities = found.probabilities.data() + i * static_cast<std::size_t>(found.side * found.side);
        copy_known(out, detection, size);
    });
}

fqvit_status fqvit_detections_mask(const fqvit_detections* handle, size_t i, uint8_t* mask, size_t size) {
    return guarded([&] {
        const Detections& found = detections_of(handle, i);
        const auto bytes = static_cast<std::size_t>(found.image.height * found.image.width);
        require_argument(mask != nullptr && size == bytes,
                         "mask: " + std::to_string(size) + " bytes, expected " + std::to_string(bytes));
        found.paste(i, mask);
    });
}

void fqvit_detections_free(fqvit_detections* found) {
    if (handles<fqvit_detections>().remove(found)) delete found;
}

}  // extern "C"
