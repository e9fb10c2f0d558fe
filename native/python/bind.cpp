// The Python module fqvit._native. Bindings only; src/fqvit/_native.pyi documents them.
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <limits>
#include <new>

#include "core/cpu.h"
#include "core/model.h"
#include "core/peak.h"
#include "core/roialign.h"
#include "image/preprocess.h"
#include "python/bind.h"

fqvit::Gate* gate = new fqvit::Gate;  // never deleted: threads may sleep in it until the process exits

nb::object new_array(const fqvit::Value& value, std::int64_t first, std::uint8_t*& data) {
    std::vector<std::size_t> shape;
    std::size_t bytes = static_cast<std::size_t>(value.bytes());
    if (first >= 0) {
        if (first > std::numeric_limits<std::int64_t>::max() / 2 / value.bytes()) throw std::bad_alloc();
        shape.push_back(static_cast<std::size_t>(first)), bytes *= static_cast<std::size_t>(first);
    }
    for (const std::int64_t size : value.shape) shape.push_back(static_cast<std::size_t>(size));
    auto* memory = new std::uint8_t[bytes + 1];
    const nb::capsule owner(memory, [](void* p) noexcept { delete[] static_cast<std::uint8_t*>(p); });
    data = memory;
    const auto type = value.dtype == fqvit::DType::u8    ? nb::dtype<std::uint8_t>()
                      : value.dtype == fqvit::DType::u16 ? nb::dtype<std::uint16_t>()
                      : value.dtype == fqvit::DType::i32 ? nb::dtype<std::int32_t>()
                                                         : nb::dtype<std::int64_t>();
    return nb::cast(nb::ndarray<nb::numpy>(memory, shape.size(), shape.data(), owner, nullptr, type));
}

namespace {

using FeatureMap = nb::ndarray<const std::uint8_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Boxes = nb::ndarray<const std::int64_t, nb::shape<-1, 4>, nb::c_contig, nb::device::cpu>;
using Images = nb::ndarray<const std::uint8_t, nb::ndim<4>, nb::c_contig, nb::device::cpu>;

void before_fork() {
    const nb::gil_scoped_release release;
    gate->close();
}

void after_fork() { gate->open(); }

void in_child() { gate = new fqvit::Gate; }  // threads that wait in the old gate exist in the parent only

void at_exit() {
    const nb::gil_scoped_release release;
    gate->end();
}

nb::dict features() {
    const fqvit::CpuFeatures found = fqvit::cpu_features();
    nb::dict out;
    out["avx2"] = found.avx2;
    out["avx_vnni"] = found.avx_vnni;
    out["avx512_vnni"] = found.avx512_vnni;
    out["avx512_vbmi"] = found.avx512_vbmi;
    out["neon"] = found.neon;
    out["neon_dotprod"] = found.neon_dotprod;
    out["neon_i8mm"] = found.neon_i8mm;
    return out;
}

std::unique_ptr<fqvit::Model> load(std::shared_ptr<fqvit::Source> source, int threads, const std::string& isa,
                                   bool keep, std::int64_t max_run_bytes) {
    return std::make_unique<fqvit::Model>(
        std::move(source),
        fqvit::EngineOptions{
            .instruction_set = isa, .threads = threads, .keep_buffers = keep, .max_run_bytes = max_run_bytes});
}

std::unique_ptr<fqvit::Model> load_file(const nb::bytes& path, int threads, const std::string& isa, bool keep,
                                        std::int64_t max_run_bytes) {
    const std::string name(path.c_str(), path.size());
    const WithoutGil without;
    return load(fqvit::open_file(name), threads, isa, keep, max_run_bytes);
}

std::unique_ptr<fqvit::Model> load_memory(const nb::bytes& data, int threads, const std::string& isa, bool keep,
                                          std::int64_t max_run_bytes) {
    const WithoutGil without;
    return load(fqvit::borrow_memory(data.data(), data.size()), threads, isa, keep, max_run_bytes);
}

void check_images(const fqvit::Engine& engine, const Images& images) {
    fqvit::Shape shape;
    for (std::size_t i = 1; i < 4; ++i) shape.push_back(static_cast<std::int64_t>(images.shape(i)));
    fqvit::require(shape == engine.image().shape, "images: ", shape, ", expected ", engine.image().shape);
}

nb::list run(fqvit::Model& model, const Images& images, bool all) {
    fqvit::Engine& engine = model.engine();
    check_images(engine, images);
    const auto count = static_cast<std::int64_t>(images.shape(0));
    nb::list out;
    std::vector<std::uint8_t*> ys;
    for (const int number : engine.outputs()) {
        std::uint8_t* y = nullptr;
        out.append(new_array(engine.value(number), count, y));
        ys.push_back(y);
        if (!all) break;
    }
    const WithoutGil without;
    engine.run_all(images.data(), count, ys);
    return out;
}

nb::list profile(fqvit::Model& model, const Images& images, int rounds) {
    check_images(model.engine(), images);
    fqvit::require(images.shape(0) == 1 && rounds >= 1, "profile: ", images.shape(0), " images and ", rounds,
                   " rounds, expected 1 image and at least 1 round");
    std::vector<fqvit::OpTime> times;
    {
        const WithoutGil without;
        times = model.engine().profile(images.data(), rounds);
    }
    nb::list out;
    for (const fqvit::OpTime& time : times) out.append(nb::make_tuple(time.name, time.tag, time.seconds, time.macs));
    return out;
}

nb::list buffers(fqvit::Model& model, const Images& images, const std::vector<std::string>& names) {
    fqvit::Engine& engine = model.engine();
    check_images(engine, images);
    fqvit::require(images.shape(0) == 1, "buffers: ", images.shape(0), " images, expected 1");
    nb::list out;
    std::vector<int> numbers;
    std::vector<std::uint8_t*> ys;
    for (const std::string& name : names) {
        const int number = engine.find(name);
        fqvit::require(engine.keeps(number), "buffer '", name,
                       "' is not kept, expected a buffer of an engine with keep=True");
        std::uint8_t* y = nullptr;
        out.append(new_array(engine.value(number), -1, y));
        ys.push_back(y), numbers.push_back(number);
    }
    const WithoutGil without;
    engine.run_buffers(images.data(), numbers, ys);
    return out;
}

// Name, kind, scale, zero point, type, shape and exponents of every output.
nb::list describe_outputs(const fqvit::Model& model) {
    const std::vector<fqvit::Output> outputs = model.header().outputs();
    nb::list out;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
        const fqvit::Value& value = model.engine().value(model.engine().outputs()[i]);
        nb::list shape, alpha;
        for (const std::int64_t size : value.shape) shape.append(size);
        for (const std::uint8_t exponent : model.alpha(i)) alpha.append(exponent);
        out.append(nb::make_tuple(outputs[i].label(), outputs[i].kind_name(), outputs[i].scale.value, outputs[i].zero,
                                  fqvit::name_of(value.dtype), nb::tuple(shape), nb::tuple(alpha)));
    }
    return out;
}

nb::bytes to_bytes(const std::string& text) { return nb::bytes(text.data(), text.size()); }

nb::object roi_align(const FeatureMap& map, const Boxes& boxes, std::int64_t side, std::int64_t cell, std::int32_t zero,
                     std::int64_t mult, int shift, std::int32_t head_zero, std::int32_t last, int threads,
                     const std::string& instruction_set) {
    const auto axis = [&](std::size_t i) { return static_cast<std::int64_t>(map.shape(i)); };
    const auto count = static_cast<std::int64_t>(boxes.shape(0));
    // A copy, because the owner of the boxes may change them after the check.
    std::vector<std::int64_t> edges(static_cast<std::size_t>(4 * count));
    if (count > 0) std::memcpy(edges.data(), boxes.data(), edges.size() * sizeof(std::int64_t));
    fqvit::RoiAlign a{.map = map.data(),
                      .height = axis(0),
                      .width = axis(1),
                      .channels = axis(2),
                      .zero = zero,
                      .boxes = edges.data(),
                      .count = count,
                      .side = side,
                      .cell = cell,
                      .mult = mult,
                      .shift = shift,
                      .head_zero = head_zero,
                      .last = last,
                      .y = nullptr};
    fqvit::check_roi_align(a);
    const fqvit::Value roi{fqvit::DType::u8, {side, side, a.channels}, 0, last};
    nb::object out = new_array(roi, count, a.y);
    const WithoutGil without;
    fqvit::roi_align(a, threads, instruction_set);
    return out;
}

nb::tuple peak(const std::string& instruction_set) {
    fqvit::Peak found{};
    {
        const WithoutGil without;
        found = fqvit::measure_peak(instruction_set);
    }
    return nb::make_tuple(found.instruction_set, found.macs_per_second);
}

fqvit::Interpolation interpolation_of(const std::string& name) {
    fqvit::require(name == "bilinear" || name == "bicubic", "preprocess: interpolation is ", name,
                   ", expected bilinear or bicubic");
    return name == "bilinear" ? fqvit::Interpolation::bilinear : fqvit::Interpolation::bicubic;
}

nb::object preprocess(const Pixels& pixels, std::int64_t height, std::int64_t width, std::int64_t channels,
                      std::int64_t resize, const std::string& interpolation, bool squash) {
    const fqvit::Preprocess p{height, width, channels, resize, interpolation_of(interpolation), {}, {}, squash};
    const auto axis = [&](std::size_t i) { return static_cast<std::int64_t>(pixels.shape(i)); };
    const auto stride = static_cast<std::int64_t>(pixels.shape(1) * pixels.shape(2));
    std::uint8_t* y = nullptr;
    nb::object out = new_array({fqvit::DType::u8, {height, width, channels}, 0, 255}, -1, y);
    const WithoutGil without;
    fqvit::preprocess(p, pixels.data(), axis(0), axis(1), axis(2), stride, y);
    return out;
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "The compiled engine of fqvit.";
    m.attr("version") = FQVIT_VERSION;
    m.def("cpu_features", &features, "Return which integer instruction sets this machine supports.");
    m.def("instruction_sets", &fqvit::instruction_sets,
          "Return the instruction sets that this build contains and this CPU supports, fastest first.");
    m.def("peak", &peak, nb::arg("instruction_set") = "",
          "Measure the multiply-accumulates per second of the matrix micro-kernel in the L1 cache, on one thread.");
    m.def("roi_align", &roi_align, nb::arg("map").noconvert(), nb::arg("boxes").noconvert(), nb::arg("side"),
          nb::arg("cell"), nb::arg("zero"), nb::arg("mult"), nb::arg("shift"), nb::arg("head_zero"), nb::arg("last"),
          nb::arg("threads"), nb::arg("instruction_set") = "",
          "Pool the codes of a feature map into a grid of side x side bins per box (RoIAlign).");
    m.def("preprocess", &preprocess, nb::arg("pixels").noconvert(), nb::arg("height"), nb::arg("width"),
          nb::arg("channels"), nb::arg("resize"), nb::arg("interpolation"), nb::arg("squash") = false,
          "Resize and center-crop a decoded image, bit-identically to fqvit.Preprocess.apply.");
    nb::set_leak_warnings(false);  // a daemon thread may keep its engine until the process exits
    nb::module_::import_("atexit").attr("register")(nb::cpp_function(&at_exit));
    const nb::module_ os = nb::module_::import_("os");
    if (nb::hasattr(os, "register_at_fork")) {
        os.attr("register_at_fork")(nb::arg("before") = nb::cpp_function(&before_fork),
                                    nb::arg("after_in_parent") = nb::cpp_function(&after_fork),
                                    nb::arg("after_in_child") = nb::cpp_function(&in_child));
    }
    nb::exception<fqvit::BadProgram>(m, "BadProgram", PyExc_ValueError);
    nb::class_<fqvit::Model>(m, "Model")
        .def("run", &run, nb::arg("images").noconvert(), nb::arg("all"))
        .def("profile", &profile, nb::arg("image").noconvert(), nb::arg("rounds"))
        .def("buffers", &buffers, nb::arg("image").noconvert(), nb::arg("names"))
        .def_prop_ro("header", [](const fqvit::Model& model) { return to_bytes(model.json()); })
        .def_prop_ro("classes",
                     [](const fqvit::Model& model) -> nb::object {
                         return model.has_classes() ? nb::object(to_bytes(model.classes())) : nb::none();
                     })
        .def_prop_ro("fingerprint", &fqvit::Model::fingerprint)
        .def_prop_ro("input_shape",
                     [](const fqvit::Model& model) {
                         const fqvit::Shape& shape = model.engine().image().shape;
                         return nb::make_tuple(shape[0], shape[1], shape[2]);
                     })
        .def_prop_ro("output_kind", [](const fqvit::Model& model) { return model.header().output.kind_name(); })
        .def_prop_ro("outputs", &describe_outputs)
        .def_prop_ro("instruction_set", [](const fqvit::Model& model) { return model.engine().instruction_set(); })
        .def_prop_ro("macs", [](const fqvit::Model& model) { return model.engine().macs(); })
        .def_prop_ro("threads", [](const fqvit::Model& model) { return model.engine().threads(); })
        .def_prop_ro("arena_bytes", [](const fqvit::Model& model) { return model.engine().arena_bytes(); })
        .def_prop_ro("run_bytes", [](const fqvit::Model& model) { return model.engine().run_bytes(); })
        .def_prop_ro("constant_bytes", [](const fqvit::Model& model) { return model.engine().constant_bytes(); });
    m.def("op_fields", &fqvit::list_op_fields, "Return the fields of every op, as JSON, for tests.");
    m.def("load_file", &load_file, nb::arg("path"), nb::arg("threads"), nb::arg("instruction_set"), nb::arg("keep"),
          nb::arg("max_run_bytes"), "Load and verify a .fqvit file.");
    m.def("load_memory", &load_memory, nb::arg("data"), nb::arg("threads"), nb::arg("instruction_set"), nb::arg("keep"),
          nb::arg("max_run_bytes"), "Load and verify the bytes of a .fqvit file.");
    bind_detector(m);
}
