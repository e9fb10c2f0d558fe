#include "core/model.h"

#include <algorithm>

#include "ir/container.h"
#include "ops/scope.h"

namespace fqvit {
namespace {

constexpr const char* CLASSES = "classes";  // the constant with the class names

// Checks of outputs and sites, on the values that the engine has inferred.
class HeaderCheck {
public:
    HeaderCheck(const Engine& engine, const Constants& constants) : engine_(engine), constants_(constants) {}

    void check(const Output& output) const {
        struct Rule {
            const char* dtypes;
            std::size_t axes, other_axes;
        };
        constexpr Rule RULES[] = {{"i32", 1, 1}, {"u8 or u16", 2, 2}, {"u8 or u16", 1, 1},        {"u8", 3, 3},
                                  {"i32", 3, 3}, {"i32", 1, 3},       {"u8 or u16 or i32", 1, 1}, {"u8", 1, 1}};
        const Rule& rule = RULES[static_cast<std::size_t>(output.kind)];
        const char* name = output.kind_name();
        const Value& value = buffer(output.buffer);
        const std::string_view dtypes(rule.dtypes);
        const bool fits = dtypes.find(name_of(value.dtype)) != std::string_view::npos;
        require(fits, "'", output.buffer, "' is ", value.dtype, ", expected ", rule.dtypes);
        const bool has_alpha = output.alpha.has_value();
        require((value.dtype != DType::i32 && output.kind != OutputKind::signs) || (output.zero == 0 && !has_alpha),
                name, " with a zero point or alpha, expected neither");
        require(output.kind != OutputKind::embedding || !has_alpha, "embedding with alpha, expected one scale");
        const std::size_t axes = value.shape.size();
        const std::string others = rule.other_axes == rule.axes ? "" : " or " + std::to_string(rule.other_axes);
        require(axes == rule.axes || axes == rule.other_axes, name, " of shape ", value.shape, ", expected ", rule.axes,
                others, " axes");
        largest_alpha(output.alpha, value.channels());
    }

    void check(const std::string& name, const Site& site) const {
        const Value& codes = buffer(name);
        require(codes.is_codes(), "'", name, "' is ", codes.dtype, ", expected u8 or u16");
        require(codes.hi < std::int64_t{1} << site.bits, site.bits, " bits for codes up to ", codes.hi);
        const std::int64_t channels = codes.channels(), alpha = largest_alpha(site.alpha, channels);
        const auto groups = static_cast<std::int64_t>(site.scale.size());
        const auto zeros = static_cast<std::int64_t>(site.zero.values.size());
        const bool has_steps = site.steps.has_value(), named_zero = site.zero.constant.has_value();
        require((site.log2 ? 1 : 0) + (site.levels.empty() ? 0 : 1) + (has_steps ? 1 : 0) <= 1,
                "more than one of log2, steps and levels");
        require(has_steps || !named_zero, "zero names a constant, but there are no steps");
        if (!site.levels.empty()) {
            require(codes.hi < static_cast<std::int64_t>(site.levels.size()), site.levels.size(),
                    " levels for codes up to ", codes.hi);
            require(*std::max_element(site.levels.begin(), site.levels.end()) > 0, "no level above 0");
        } else if (has_steps) {
            check_steps(site, groups, channels);
        } else if (!site.log2) {
            const bool one_per_alpha = site.alpha.has_value() && groups == 1 && zeros == alpha + 1;
            require(one_per_alpha || groups == zeros, groups, " scales and ", zeros, " zero points");
            require(groups > 0 && channels % groups == 0, groups, " scales for ", channels, " channels");
        }
    }

private:
    const Value& buffer(const std::string& name) const {
        const int number = engine_.find(name);
        require(number >= 0, "no op writes '", name, "'");
        return engine_.value(number);
    }

    Constant constant(const std::string& name, std::initializer_list<DType> dtypes, std::int64_t count) const {
        const Constants::Entry* entry = constants_.find(name);
        require(entry != nullptr, "constant '", name, "' is missing");
        const bool fits = std::find(dtypes.begin(), dtypes.end(), entry->dtype) != dtypes.end();
        require(fits && count > 0 && entry->shape == Shape({count}), "constant '", name, "' is ", entry->dtype, " ",
                entry->shape, ", expected ", *dtypes.begin(), " [", count, "]");
        return constants_.read(name);
    }

    std::int64_t largest_alpha(const OptionalName& name, std::int64_t channels) const {
        if (!name.has_value()) return 0;
        std::int64_t largest = 0;
        for_each_element(constant(*name, {DType::u8}, channels),
                         [&](std::int64_t alpha) { largest = std::max(largest, alpha); });
        return in_range(largest, 0, MAX_ALPHA, name->c_str());
    }

    void check_steps(const Site& site, std::int64_t groups, std::int64_t channels) const {
        require((groups == 1 || groups == 3) && channels % groups == 0, groups, " scales with steps for ", channels,
                " channels, expected 1, or 3 if channels are a multiple of 3");
        for_each_element(constant(*site.steps, {DType::u16}, channels / groups),
                         [&](std::int64_t step) { require(step > 0, "constant '", *site.steps, "' has a step of 0"); });
        if (site.zero.constant.has_value()) {
            constant(*site.zero.constant, {DType::u8, DType::u16}, channels);
        } else {
            const auto zeros = static_cast<std::int64_t>(site.zero.values.size());
            require(zeros > 0 && channels % zeros == 0, zeros, " zero points for ", channels, " channels");
        }
    }

    const Engine& engine_;
    const Constants& constants_;
};

}  // namespace

void check_header(const Header& header, const Engine& engine, const Constants& constants) {
    const HeaderCheck checks(engine, constants);
    const auto named = [](const std::string& what, const auto& check) {
        try {
            check();
        } catch (const BadProgram& error) {
            throw BadProgram(what + ": " + error.what());
        }
    };
    const std::vector<Output> outputs = header.outputs();
    for (const Output& output : outputs) {
        named("output", [&] {
            const auto same = [&](const Output& other) { return other.label() == output.name; };
            require(output.name.empty() || std::count_if(outputs.begin(), outputs.end(), same) == 1,
                    "two outputs have the name '", output.name, "'");
            checks.check(output);
        });
    }
    for (const auto& [name, site] : header.sites) {
        named("site " + name, [&, &name = name, &site = site] { checks.check(name, site); });
    }
}

void check_classes(const Header& header, const Engine& engine, std::int64_t count) {
    const std::vector<Output> outputs = header.outputs();
    for (std::size_t i = 0; i < outputs.size(); ++i) {
        const std::int64_t logits = engine.value(engine.outputs()[i]).channels();
        require(outputs[i].kind != OutputKind::logits || count == logits, count, " class names for ", logits,
                " logits");
    }
}

Model::Model(std::shared_ptr<Source> source, const EngineOptions& options) {
    with_remedy([&] { load(std::move(source), options); });
}

void Model::load(std::shared_ptr<Source> source, const EngineOptions& options) {
    const Container container = read_container(std::move(source));
    if (!container.metadata.contains(PROGRAM_KEY)) {
        throw BadProgramWithRemedy(
            container.metadata.contains(DETECTOR_KEY)
                ? "holds a detector, not a classifier. Use `fqvit detect eval`, `predict` or `draw`, or `fqvit inspect`"
                : "safetensors, but not a quantized program. Make one with `fqvit quantize --weights`");
    }
    json_ = checked_json(container, PROGRAM_KEY);
    fingerprint_ = container.metadata.at("fingerprint");
    header_ = read_header(json_);
    Program program{header_.input_shape(), std::move(header_.ops), {}, container.constants};
    for (const Output& output : header_.outputs()) program.outputs.push_back(output.buffer);
    engine_ = std::make_unique<Engine>(program, options);
    check_header(header_, *engine_, program.constants);
    for (const Output& output : header_.outputs()) {
        alphas_.emplace_back();
        if (output.alpha.has_value()) alphas_.back() = program.constants.read(*output.alpha).bytes;
    }
    if (program.constants.contains(CLASSES)) {
        const Constant names = program.constants.read(CLASSES);
        has_classes_ = true;
        classes_.assign(names.bytes.begin(), names.bytes.end());
        const std::int64_t count = std::count(classes_.begin(), classes_.end(), '\n') + 1;
        check_classes(header_, *engine_, count);
    }
}

}  // namespace fqvit
