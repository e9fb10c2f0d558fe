// The part of the C API for classifiers and feature extractors. include/fqvit.h documents every function.
#include "core/model.h"

#include <algorithm>

#include "capi/handles.h"
#include "capi/text.h"
#include "image/preprocess.h"

using namespace fqvit;
using namespace fqvit::capi;

struct fqvit_model {
    fqvit_model(std::shared_ptr<Source> source, const EngineOptions& options) : model(std::move(source), options) {
        const std::string& names = model.classes();
        for (std::size_t begin = 0; model.has_classes() && begin <= names.size();) {
            const std::size_t end = std::min(names.find('\n', begin), names.size());
            classes.push_back(valid_utf8(std::string_view(names).substr(begin, end - begin)));
            begin = end + 1;
        }
        outputs = model.header().outputs();
        for (const Output& output : outputs) labels.push_back(output.label());
    }

    Model model;
    std::vector<std::string> classes, labels;
    std::vector<Output> outputs;
};

namespace {

Handles<fqvit_model>& handles() {
    static auto* const live = new Handles<fqvit_model>;  // never destroyed: other threads may run at exit
    return *live;
}

Model& model_of(const fqvit_model* handle) {
    handles().require(handle);
    return const_cast<fqvit_model*>(handle)->model;
}

fqvit_tensor describe(const Value& value, const char* name, const char* kind, const char* output_name) {
    fqvit_tensor out{};
    out.name = name, out.kind = kind, out.output_name = output_name;
    out.dtype = value.dtype == DType::u8 ? FQVIT_U8 : value.dtype == DType::u16 ? FQVIT_U16 : FQVIT_I32;
    out.axes = static_cast<std::uint32_t>(value.shape.size());
    std::copy(value.shape.begin(), value.shape.end(), out.shape);
    out.bytes = static_cast<std::uint64_t>(value.bytes());
    return out;
}

void require_size(const char* name, const void* pointer, std::size_t size, std::int64_t bytes, std::size_t count) {
    require_argument(pointer != nullptr || count == 0, std::string(name) + ": null, expected an array");
    const auto each = static_cast<std::uint64_t>(bytes);
    require_argument(count <= UINT64_MAX / each && size == each * count,
                     std::string(name) + ": " + std::to_string(size) + " bytes, expected " + std::to_string(each) +
                         " for each of " + std::to_string(count) + " images");
}

void run(fqvit_model* handle, const std::uint8_t* images, std::size_t count, void* const* ys, const std::size_t* sizes,
         std::uint32_t outputs) {
    Engine& engine = model_of(handle).engine();
    require_argument(count <= static_cast<std::size_t>(INT64_MAX) / 2, "count: too large");
    require_argument(images != nullptr || count == 0, "images: null, expected an array");
    std::vector<std::uint8_t*> arrays;
    for (std::uint32_t i = 0; i < outputs; ++i) {
        const Value& value = engine.value(engine.outputs()[i]);
        require_size("output", ys[i], sizes[i], value.bytes(), count);
        require_argument(
            reinterpret_cast<std::uintptr_t>(ys[i]) % static_cast<std::uintptr_t>(size_of(value.dtype)) == 0,
            "output: not aligned, expected an address that is a multiple of the element size");
        arrays.push_back(static_cast<std::uint8_t*>(ys[i]));
    }
    engine.run_all(images, static_cast<std::int64_t>(count), arrays);
}

fqvit_status load(fqvit_model** handle, const auto& make) {
    return guarded([&] {
        require_argument(handle != nullptr, "model: null, expected the address of a handle");
        *handle = nullptr;
        std::unique_ptr<fqvit_model> made = make();
        handles().add(made.get());
        *handle = made.release();
    });
}

}  // namespace

extern "C" {

fqvit_status fqvit_model_load(const char* path, const fqvit_options* options, fqvit_model** model) {
    return load(model, [&] {
        require_argument(path != nullptr, "path: null, expected the name of a file");
        const EngineOptions checked = read_options(options, EngineOptions{}.max_run_bytes);
        std::unique_ptr<fqvit_model> made;
        with_path(path, [&] { made = std::make_unique<fqvit_model>(open_file(path), checked); });
        return made;
    });
}

fqvit_status fqvit_model_load_memory(const void* data, size_t size, const fqvit_options* options, fqvit_model** model) {
    return load(model, [&] {
        require_argument(data != nullptr, "data: null, expected the bytes of a file");
        const EngineOptions checked = read_options(options, EngineOptions{}.max_run_bytes);
        return std::make_unique<fqvit_model>(borrow_memory(data, size), checked);
    });
}

void fqvit_model_free(fqvit_model* model) {
    if (handles().remove(model)) delete model;
}

fqvit_status fqvit_model_describe(const fqvit_model* handle, fqvit_description* description, size_t size) {
    return guarded([&] {
        const Model& model = model_of(handle);
        const Header& header = model.header();
        fqvit_description out{};
        out.model = header.model.c_str(), out.source = header.source.c_str();
        out.recipe = header.recipe.text.c_str(), out.header = model.json().c_str();
        out.fingerprint = model.fingerprint().c_str();
        out.instruction_set = model.engine().instruction_set();
        out.threads = static_cast<std::uint32_t>(model.engine().threads());
        out.outputs = static_cast<std::uint32_t>(handle->outputs.size());
        out.classes = static_cast<std::uint32_t>(handle->classes.size());
        out.calibration_images = static_cast<std::uint64_t>(std::max<std::int64_t>(header.images, 0));
        out.weight_bytes = model.engine().constant_bytes(), out.run_bytes = model.engine().run_bytes();
        out.resize = static_cast<std::uint32_t>(header.preprocess.resize);
        out.interpolation = Names<Interpolation>::names[static_cast<std::size_t>(header.preprocess.interpolation)];
        out.squash = header.preprocess.squash ? 1 : 0;
        out.macs = static_cast<std::uint64_t>(model.engine().macs());
        copy_known(out, description, size);
    });
}

fqvit_status fqvit_model_input(const fqvit_model* handle, fqvit_tensor* tensor, size_t size) {
    return guarded([&] {
        const Model& model = model_of(handle);
        const std::optional<CodeInput>& codes = model.header().input;
        fqvit_tensor out = describe(model.engine().image(), INPUT, codes.has_value() ? "codes" : "pixels", INPUT);
        if (codes.has_value()) out.scale = codes->scale.value, out.zero_point = codes->zero;
        copy_known(out, tensor, size);
    });
}

fqvit_status fqvit_model_output(const fqvit_model* handle, uint32_t i, fqvit_tensor* tensor, size_t size) {
    return guarded([&] {
        const Model& model = model_of(handle);
        require_argument(i < handle->outputs.size(), "output: index " + std::to_string(i) + ", expected less than " +
                                                         std::to_string(handle->outputs.size()));
        const Output& output = handle->outputs[i];
        const Engine& engine = model.engine();
        fqvit_tensor out = describe(engine.value(engine.outputs()[i]), output.buffer.c_str(), output.kind_name(),
                                    handle->labels[i].c_str());
        out.scale = output.scale.value, out.zero_point = output.zero;
        out.alpha = model.alpha(i).empty() ? nullptr : model.alpha(i).data();
        copy_known(out, tensor, size);
    });
}

const char* fqvit_model_class_name(const fqvit_model* handle, uint32_t i) {
    const char* name = nullptr;
    static_cast<void>(guarded([&] {
        model_of(handle);
        if (i < handle->classes.size()) name = handle->classes[i].c_str();
    }));
    return name;
}

fqvit_status fqvit_model_preprocess(const fqvit_model* handle, const fqvit_image* image, uint8_t* input, size_t size) {
    return guarded([&] {
        const Model& model = model_of(handle);
        require_argument(!model.header().input.has_value(), "model: takes codes, expected one that takes pixels");
        require_argument(image != nullptr && image->pixels != nullptr, "image: null, expected pixels");
        require_size("input", input, size, model.engine().image().bytes(), 1);
        const std::uint64_t row = std::uint64_t{image->width} * image->channels;
        const std::uint64_t stride = image->stride == 0 ? row : image->stride;
        require_argument(stride <= static_cast<std::uint64_t>(Preprocess::MAX_IMAGE_STRIDE), "image: stride too large");
        try {
            preprocess(model.header().preprocess, image->pixels, image->height, image->width, image->channels,
                       static_cast<std::int64_t>(stride), input);
        } catch (const BadProgram& error) {
            throw BadArgument(error.what());
        }
    });
}

fqvit_status fqvit_model_run(fqvit_model* handle, const uint8_t* images, size_t count, void* y, size_t size) {
    return guarded([&] { run(handle, images, count, &y, &size, 1); });
}

fqvit_status fqvit_model_run_all(fqvit_model* handle, const uint8_t* images, size_t count, void* const* ys,
                                 const size_t* sizes, uint32_t outputs) {
    return guarded([&] {
        model_of(handle);
        require_argument(outputs == handle->outputs.size(), "outputs: " + std::to_string(outputs) + ", expected " +
                                                                std::to_string(handle->outputs.size()));
        require_argument(ys != nullptr && sizes != nullptr, "outputs: null, expected arrays");
        run(handle, images, count, ys, sizes, outputs);
    });
}

}  // extern "C"
