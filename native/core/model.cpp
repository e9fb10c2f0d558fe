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
            bool i32, wide_codes;
            std::size_t axes, other_axes;
        };
        constexpr Rule RULES[] = {{true, false, 1, 1},  {false, true, 2, 2}, {false, true, 1, 1},
                                  {false, false, 3, 3}, {true, false, 3, 3}, {true, false, 1, 3}};
        const auto kind = static_cast<std::size_t>(output.kind);
        const Rule& rule = RULES[kind];
        const char* name = Names<OutputKind>::names[kind];
        const Value& value = buffer(output.buffer);
        const bool fits = rule.i32 ? value.dtype == DType::i32
                                   : value.dtype == DType::u8 || (rule.wide_codes && value.dtype == DType::u16);
        const char* dtypes = rule.i32 ? "i32" : rule.wide_codes ? "u8 or u16" : "u8";
        require(fits, "'", output.buffer, "' is ", value.dtype, ", expected ", dtypes);
        require(!rule.i32 || (output.zero == 0 && !output.alpha.has_value()), name,
                " with a zero point or alpha, expected neither");
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
        require(number >= 0, "reads '", name, "' before any op writes it");
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
    for (const Output& output : header.outputs()) named("output", [&] { checks.check(output); });
    for (const auto& [name, site] : header.sites) {
        named("site " + name, [&, &name = name, &site = site] { checks.check(name, site); });
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
        const std::int64_t logits = engine_->output().channels();
        require(header_.output.kind != OutputKind::logits || count == logits, count, " class names for ", logits,
                " logits");
    }
}

}  // namespace fqvit
