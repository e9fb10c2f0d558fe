// The detector in the Python module fqvit._native. src/fqvit/_native.pyi documents it.
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <chrono>
#include <cstring>

#include "detect/detector.h"
#include "detect/mask.h"
#include "python/bind.h"

namespace {

using Edges = nb::ndarray<const std::int64_t, nb::shape<4>, nb::c_contig, nb::device::cpu>;
using Probabilities = nb::ndarray<const std::int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::unique_ptr<fqvit::Detector> load_file(const nb::bytes& path, int threads, const std::string& isa) {
    const std::string name(path.c_str(), path.size());
    const WithoutGil without;
    return std::make_unique<fqvit::Detector>(fqvit::open_file(name),
                                             fqvit::DetectorOptions{.instruction_set = isa, .threads = threads});
}

std::unique_ptr<fqvit::Detector> load_memory(const nb::bytes& data, int threads, const std::string& isa) {
    const WithoutGil without;
    return std::make_unique<fqvit::Detector>(fqvit::borrow_memory(data.data(), data.size()),
                                             fqvit::DetectorOptions{.instruction_set = isa, .threads = threads});
}

fqvit::Image image_of(const Pixels& pixels) {
    fqvit::require(pixels.shape(2) == 3, "image: ", pixels.shape(2), " channels, expected 3");
    const auto height = static_cast<std::int64_t>(pixels.shape(0)), width = static_cast<std::int64_t>(pixels.shape(1));
    return {pixels.data(), {height, width}, 3 * width};
}

// Copies `count` elements to a new numpy array.
template <class T>
nb::object to_array(const T* from, std::size_t count, fqvit::DType dtype, fqvit::Shape shape, std::int64_t rows) {
    std::uint8_t* to = nullptr;
    nb::object out = new_array({dtype, std::move(shape), 0, 0}, rows, to);
    if (count > 0) std::memcpy(to, from, count * sizeof(T));
    return out;
}

nb::tuple to_tuple(const fqvit::Detections& found) {
    const std::size_t count = found.count();
    const auto rows = static_cast<std::int64_t>(count);
    const fqvit::DType i64 = fqvit::DType::i64, i32 = fqvit::DType::i32;
    return nb::make_tuple(
        to_array(found.boxes.data(), count, i64, {4}, rows), to_array(found.scores.data(), count, i64, {}, rows),
        to_array(found.labels.data(), count, i64, {}, rows),
        to_array(found.probabilities.data(), found.probabilities.size(), i32, {found.side, found.side}, rows));
}

nb::tuple detect(fqvit::Detector& detector, const Pixels& pixels) {
    const fqvit::Image image = image_of(pixels);
    fqvit::Detections found;
    {
        const WithoutGil without;
        found = detector.detect(image);
    }
    return to_tuple(found);
}

nb::tuple detect_resized(fqvit::Detector& detector, const Pixels& pixels, std::int64_t height, std::int64_t width) {
    const fqvit::Image image = image_of(pixels);
    fqvit::Detections found;
    {
        const WithoutGil without;
        found = detector.detect_resized(image, {height, width});
    }
    return to_tuple(found);
}

// Detects objects and measures the wall time of each step: the time since the previous one.
nb::tuple profile(fqvit::Detector& detector, const Pixels& pixels, std::int64_t height, std::int64_t width) {
    using Clock = std::chrono::steady_clock;
    const fqvit::Image image = image_of(pixels);
    fqvit::Detections found;
    std::vector<fqvit::OpTime> times;
    {
        const WithoutGil without;
        Clock::time_point last = Clock::now();
        found = detector.detect_resized(
            image, {height, width}, [&](const std::string& name, const std::string& tag, std::int64_t macs) {
                const Clock::time_point now = Clock::now();
                times.push_back({name, tag, std::chrono::duration<double>(now - last).count(), macs});
                last = now;
            });
    }
    nb::list steps;
    for (const fqvit::OpTime& time : times) steps.append(nb::make_tuple(time.name, time.tag, time.seconds, time.macs));
    return nb::make_tuple(to_tuple(found), steps);
}

nb::object paste_mask(const Probabilities& probabilities, const Edges& box, std::int64_t height, std::int64_t width,
                      std::int64_t threshold) {
    const auto side = static_cast<std::int64_t>(probabilities.shape(0));
    fqvit::require(
        side == static_cast<std::int64_t>(probabilities.shape(1)) && side >= 1 && side <= 2 * fqvit::MAX_ROI_SIDE,
        "mask: ", side, " x ", probabilities.shape(1), ", expected a square of at most 128 x 128");
    const fqvit::Box edges{box(0), box(1), box(2), box(3)};
    std::uint8_t* mask = nullptr;
    nb::object out = new_array({fqvit::DType::u8, {height, width}, 0, 1}, -1, mask);
    const WithoutGil without;
    fqvit::paste_mask(probabilities.data(), side, edges, threshold, {height, width}, mask);
    return out;
}

}  // namespace

void bind_detector(nb::module_& m) {
    using fqvit::Detector;
    nb::class_<Detector>(m, "Detector")
        .def("detect", &detect, nb::arg("pixels").noconvert())
        .def("detect_resized", &detect_resized, nb::arg("pixels").noconvert(), nb::arg("height"), nb::arg("width"))
        .def("profile", &profile, nb::arg("pixels").noconvert(), nb::arg("height"), nb::arg("width"))
        .def_prop_ro("header",
                     [](const Detector& detector) { return nb::bytes(detector.json().data(), detector.json().size()); })
        .def_prop_ro("fingerprint", &Detector::fingerprint)
        .def_prop_ro("classes", &Detector::classes)
        .def_prop_ro("threshold", [](const Detector& detector) { return detector.header().between.mask; })
        .def_prop_ro("instruction_set", &Detector::instruction_set)
        .def_prop_ro("threads", &Detector::threads)
        .def_prop_ro("kept_sizes", &Detector::kept_sizes);
    m.def("load_detector_file", &load_file, nb::arg("path"), nb::arg("threads"), nb::arg("instruction_set"),
          "Load and verify a .fqvit file with a detector.");
    m.def("load_detector_memory", &load_memory, nb::arg("data"), nb::arg("threads"), nb::arg("instruction_set"),
          "Load and verify the bytes of a .fqvit file with a detector.");
    m.def("paste_mask", &paste_mask, nb::arg("probabilities").noconvert(), nb::arg("box").noconvert(),
          nb::arg("height"), nb::arg("width"), nb::arg("threshold"),
          "Paste the mask probabilities of a box into an image.");
}
