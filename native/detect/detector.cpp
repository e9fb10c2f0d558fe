#include "detect/detector.h"

#include <algorithm>
#include <list>
#include <set>

#include "core/dispatch.h"
#include "core/memory_size.h"
#include "core/model.h"
#include "core/mutex.h"
#include "detect/exp.h"
#include "detect/head.h"
#include "detect/mask.h"
#include "detect/proposals.h"
#include "detect/resize_program.h"
#include "ir/container.h"

namespace fqvit {
namespace {

constexpr std::size_t KEPT_SIZES = 2;

// The pyramid for one image size. All sizes share the packed weights and the memory of runs.
struct Pyramid {
    ImageSize size;
    std::unique_ptr<Engine> engine;
};

std::set<std::string> weight_names(const Program& program) {
    std::set<std::string> names;
    for (const OpFields& op : program.ops) {
        if (const auto* linear = std::get_if<LinearFields>(&op)) names.insert(linear->weight_part("w"));
    }
    return names;
}

void require_size(ImageSize size, std::int64_t limit) {
    const bool fits = std::min(size.height, size.width) >= 1 && std::max(size.height, size.width) <= limit;
    if (!fits) {
        throw BadProgramWithRemedy("image of " + std::to_string(size.height) + " x " + std::to_string(size.width) +
                                   ": expected sides of 1 to " + std::to_string(limit) + ". Resize it");
    }
}

}  // namespace

struct Detector::State {
    State(std::shared_ptr<Source> source, const DetectorOptions& options);

    void load(std::shared_ptr<Source> source);
    Engine& pyramid(ImageSize padded);
    Detections detect(ImageSize size, ImageSize original, const Image& image, const OpDone& done);
    std::vector<ProposalLevel> proposal_levels(const Engine& engine) const;
    std::vector<LevelMap> level_maps(const Engine& engine) const;
    std::vector<Candidate> classify(const std::vector<LevelMap>& maps, std::vector<Box> boxes, ImageSize size,
                                    const OpDone& done);
    std::vector<std::int32_t> mask_probabilities(const std::vector<LevelMap>& maps,
                                                 const std::vector<Candidate>& chosen, const OpDone& done);

    std::string instruction_set;
    std::int64_t max_run_bytes;
    std::shared_ptr<ThreadPool> pool;
    std::shared_ptr<RunMemory> pyramid_memory = std::make_shared<RunMemory>();
    DetectorHeader header;
    std::string json, fingerprint;
    std::int64_t classes = 0;
    Program pyramid_template;  // without weights, indices and regions
    std::shared_ptr<WeightStore> pyramid_weights;
    std::vector<std::size_t> maps, scores, deltas;  // positions among the pyramid's outputs
    std::vector<Head> boxes, masks;
    std::list<Pyramid> pyramids;  // the most recently used one last
    Mutex mutex;                  // held by every call that runs the detector
};

Detector::State::State(std::shared_ptr<Source> source, const DetectorOptions& options)
    : instruction_set(select_kernels(options.instruction_set).name),
      max_run_bytes(options.max_run_bytes),
      pool(std::make_shared<ThreadPool>(std::clamp(options.threads, 1, 256))) {
    with_remedy([&] { load(std::move(source)); });
}

void Detector::State::load(std::shared_ptr<Source> source) {
    const Container container = read_container(std::move(source));
    if (!container.metadata.contains(DETECTOR_KEY)) {
        throw BadProgramWithRemedy(
            container.metadata.contains(PROGRAM_KEY)
                ? "holds a classifier or an embedding model, not a detector. "
                  "Use `fqvit eval`, `fqvit classify`, `fqvit embed` or `fqvit export` with it"
                : "safetensors, but not a quantized program. Make one with `fqvit detect quantize --weights`");
    }
    json = checked_json(container, DETECTOR_KEY);
    fingerprint = container.metadata.at("fingerprint");
    header = read_detector_header(json);
    Parts parts = read_parts(header, container.constants, instruction_set);
    check_detector(header, parts);

    const DetectorConstants& c = header.between;
    classes = parts.boxes[0].engine->output().channels() - 1;
    const std::vector<Output> map_outputs = outputs_of(header.pyramid, OutputKind::map);
    const Head::Shared shared{pool, std::make_shared<RunMemory>(), instruction_set};
    for (std::size_t i = 0; i < c.stages(); ++i) {
        boxes.emplace_back(parts.boxes[i], map_outputs, c.box_squares[i], c, shared);
        masks.emplace_back(parts.masks[i], map_outputs, c.mask_squares[i], c, shared);
    }
    const std::vector<Output> all = header.pyramid.outputs();
    for (std::size_t i = 0; i < all.size(); ++i) {
        if (all[i].kind == OutputKind::map) maps.push_back(i);
        if (all[i].kind == OutputKind::scores) scores.push_back(i);
        if (all[i].kind == OutputKind::deltas) deltas.push_back(i);
    }
    pyramid_weights = parts.pyramid.weights;
    const std::set<std::string> packed = weight_names(parts.pyramid.program);
    pyramid_template = without_sized_constants(std::move(parts.pyramid.program));
    pyramid_template.constants = pyramid_template.constants.detached(packed);
}

Engine& Detector::State::pyramid(ImageSize padded) {
    const auto found =
        std::find_if(pyramids.begin(), pyramids.end(), [&](const Pyramid& one) { return one.size == padded; });
    if (found != pyramids.end()) {
        pyramids.splice(pyramids.end(), pyramids, found);
        return *pyramids.back().engine;
    }
    if (pyramids.size() >= KEPT_SIZES) {
        pyramids.pop_front();
        std::uint64_t largest = 0;
        for (const Pyramid& one : pyramids) largest = std::max(largest, one.engine->arena_bytes());
        pyramid_memory->trim(memory_size(largest));  // so that one large image does not occupy memory forever
    }
    std::unique_ptr<Engine> engine;
    with_remedy([&] {
        const Program program = resized(pyramid_template, header.pyramid.moves, padded.height, padded.width);
        engine = verified_engine(header.pyramid, program,
                                 {.instruction_set = instruction_set,
                                  .max_run_bytes = max_run_bytes,
                                  .weights = pyramid_weights,
                                  .pool = pool,
                                  .memory = pyramid_memory});
        // Levels whose grids are equal at the image size stored in the file may have different grids at this size.
        check_grids(header.pyramid, *engine, header.between.strides);
    });
    pyramids.push_back({padded, std::move(engine)});
    return *pyramids.back().engine;
}

std::vector<ProposalLevel> Detector::State::proposal_levels(const Engine& engine) const {
    std::vector<ProposalLevel> out;
    for (std::size_t i = 0; i < scores.size(); ++i) {
        const Shape& shape = engine.value(engine.outputs()[scores[i]]).shape;
        out.push_back({{shape[0], shape[1]},
                       reinterpret_cast<const std::int32_t*>(engine.output_data(scores[i])),
                       reinterpret_cast<const std::int32_t*>(engine.output_data(deltas[i]))});
    }
    return out;
}

std::vector<LevelMap> Detector::State::level_maps(const Engine& engine) const {
    std::vector<LevelMap> out;
    for (const std::size_t i : maps) {
        const Shape& shape = engine.value(engine.outputs()[i]).shape;
        out.push_back({engine.output_data(i), shape[0], shape[1]});
    }
    return out;
}

// Runs the box heads on the proposals. The boxes of the result are in the coordinates of the network's input.
std::vector<Candidate> Detector::State::classify(const std::vector<LevelMap>& level_maps, std::vector<Box> proposals,
                                                 ImageSize size, const OpDone& done) {
    if (proposals.empty()) return {};
    const DetectorConstants& c = header.between;
    const std::size_t row = static_cast<std::size_t>(classes) + 1;
    std::vector<std::int64_t> total(proposals.size() * row);
    BoxOutputs found{classes, false};
    for (std::size_t stage = 0; stage < boxes.size(); ++stage) {
        Head& head = boxes[stage];
        const auto logit_count = static_cast<std::size_t>(head.output_count(0));
        const auto delta_count = static_cast<std::size_t>(head.output_count(1));
        found.one_box_per_class = delta_count > 4;
        found.logits.resize(proposals.size() * logit_count);
        found.deltas.resize(proposals.size() * delta_count);
        head.run(level_maps, proposals, done, [&](std::size_t n, const std::vector<const std::int32_t*>& outputs) {
            std::copy_n(outputs[0], logit_count, found.logits.data() + n * logit_count);
            std::copy_n(outputs[1], delta_count, found.deltas.data() + n * delta_count);
            for (std::size_t i = 0; i < row; ++i) total[n * row + i] += c.classes[stage].apply(outputs[0][i]);
        });
        if (stage + 1 < boxes.size()) {
            refine(proposals, found, stage, size, c);
            if (done) done("", "detections", 0);
        }
    }
    std::vector<Candidate> chosen = select_detections(proposals, total, found, size, c);
    if (done) done("", "detections", 0);
    return chosen;
}

// Returns the mask probabilities for the class of each detection, averaged over the stages: i32 [n, side, side] in
// units of 2^-15.
std::vector<std::int32_t> Detector::State::mask_probabilities(const std::vector<LevelMap>& level_maps,
                                                              const std::vector<Candidate>& chosen,
                                                              const OpDone& done) {
    const DetectorConstants& c = header.between;
    const auto side = static_cast<std::size_t>(2 * masks[0].side()), pixels = side * side;
    std::vector<Box> found;
    for (const Candidate& one : chosen) found.push_back(one.box);
    std::vector<std::int32_t> total(found.size() * pixels);  // sums of at most 16 stages, each at most 2^15
    for (std::size_t stage = 0; stage < masks.size(); ++stage) {
        masks[stage].run(level_maps, found, done, [&](std::size_t n, const std::vector<const std::int32_t*>& outputs) {
            const std::int32_t* logits = outputs[0] + chosen[n].label;
            for (std::size_t i = 0; i < pixels; ++i) {
                const std::int64_t logit = c.mask_logits[stage].apply(logits[static_cast<std::int64_t>(i) * classes]);
                total[n * pixels + i] += static_cast<std::int32_t>(sigmoid(logit));
            }
        });
        if (done) done("", "detections", 0);
    }
    const auto stages = static_cast<std::int64_t>(c.stages());
    for (std::int32_t& sum : total) sum = static_cast<std::int32_t>(round_divide(sum, stages));
    return total;
}

Detections Detector::State::detect(ImageSize size, ImageSize original, const Image& image, const OpDone& done) {
    require_size(size, MAX_SIDE);
    require_size(original, Image::MAX_IMAGE_SIDE);
    const std::lock_guard lock(mutex);
    const ImageSize padded = padded_size(size);
    Engine& engine = pyramid(padded);
    std::uint8_t* input = engine.input();
    resize_image(image, header.resize, size, input, 3 * padded.width);
    pad_image(input, size, padded, header.between.padding);
    if (done) done("", "resize", 0);
    engine.run_in_place(done);
    const std::vector<LevelMap> level_maps = this->level_maps(engine);
    std::vector<Box> proposals = propose(proposal_levels(engine), size, header.between);
    if (done) done("", "proposals", 0);
    const std::vector<Candidate> chosen = classify(level_maps, std::move(proposals), size, done);
    Detections out{original, 2 * masks[0].side(), header.between.mask, {}, {}, {}, {}};
    out.probabilities = mask_probabilities(level_maps, chosen, done);
    for (const Candidate& one : chosen) {
        out.boxes.push_back(rescale(one.box, size, original));
        out.scores.push_back(one.score), out.labels.push_back(one.label);
    }
    if (done) done("", "detections", 0);
    return out;
}

Detector::Detector(std::shared_ptr<Source> source, const DetectorOptions& options)
    : state_(std::make_unique<State>(std::move(source), options)) {}

Detector::~Detector() = default;

Detections Detector::detect(const Image& image) {
    require_size(image.size, Image::MAX_IMAGE_SIDE);
    const DetectSettings& s = state_->header.settings;
    return state_->detect(resized_size(image.size, s.short_side, s.long_side), image.size, image, nullptr);
}

Detections Detector::detect_resized(const Image& resized, ImageSize original, const OpDone& done) {
    return state_->detect(resized.size, original, resized, done);
}

void Detections::paste(std::size_t i, std::uint8_t* mask) const {
    require(i < count(), "mask ", i, ": expected a number below ", count());
    const std::int32_t* own = probabilities.data() + i * static_cast<std::size_t>(side * side);
    paste_mask(own, side, boxes[i], threshold, image, mask);
}

const DetectorHeader& Detector::header() const { return state_->header; }
const std::string& Detector::json() const { return state_->json; }
const std::string& Detector::fingerprint() const { return state_->fingerprint; }
std::int64_t Detector::classes() const { return state_->classes; }
std::int64_t Detector::mask_side() const { return 2 * state_->masks[0].side(); }
const char* Detector::instruction_set() const { return select_kernels(state_->instruction_set).name; }
int Detector::threads() const { return state_->pool->threads(); }
std::size_t Detector::kept_sizes() const {
    const std::lock_guard lock(state_->mutex);
    return state_->pyramids.size();
}

}  // namespace fqvit
