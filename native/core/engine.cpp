#include "fqvit/engine.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "core/fuse.h"
#include "fqvit/cpu.h"

namespace fqvit {
namespace {

struct Choice {
    const char* name;
    const Gemm* gemm;
    const Kernels* kernels;
};

// What this build has and this CPU can run, best first.
std::vector<Choice> choices() {
    const CpuFeatures cpu = cpu_features();
    const Choice all[] = {
        {"avx512_vnni", cpu.avx512_vnni ? gemm_avx512_vnni() : nullptr, cpu.avx2 ? kernels_avx2() : nullptr},
        {"avx_vnni", cpu.avx_vnni ? gemm_avx_vnni() : nullptr, cpu.avx2 ? kernels_avx2() : nullptr},
        {"avx2", cpu.avx2 ? gemm_avx2() : nullptr, cpu.avx2 ? kernels_avx2() : nullptr},
        {"neon_dotprod", cpu.neon_dotprod ? gemm_neon_dotprod() : nullptr, kernels_scalar()},
        {"scalar", gemm_scalar(), kernels_scalar()},
    };
    std::vector<Choice> found;
    for (const Choice& choice : all) {
        if (choice.gemm != nullptr && choice.kernels != nullptr) found.push_back(choice);
    }
    return found;
}

std::size_t aligned(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
    for (const Choice& choice : choices()) names.emplace_back(choice.name);
    return names;
}

Machine machine_of(const std::string& name) {
    std::string known;
    for (const Choice& choice : choices()) {
        if (name.empty() || name == choice.name) return {choice.gemm, choice.kernels};
        known += (known.empty() ? "" : ", ") + std::string(choice.name);
    }
    throw BadProgram("instruction set " + name + ": not in this build or not on this CPU; it has " + known);
}

Engine::Engine(Shape image, const std::string& instruction_set, int threads)
    : machine_(machine_of(instruction_set)),
      pool_(std::clamp(threads, 1, 256)) {
    need(image.size() == 3, "an image has three axes");
    values_.push_back(Value{DType::u8, std::move(image), 0, 255});
    values_.front().count();  // refuses what is too large
    is_constant_.push_back(false), data_.emplace_back(), names_.emplace_back("pixels");
}

int Engine::constant(const Array& array) {
    const std::lock_guard lock(running_);
    need(!finished(), "the program is finished");
    need(!array.shape.empty() && array.shape.size() <= MAX_AXES && count_of(array) > 0,
         "a constant has an impossible shape");
    need(array.dtype != DType::i8 && array.dtype != DType::i64, "a constant has another type than buffers");
    const std::vector<std::int64_t> entries =
        integers(array, -(std::int64_t{1} << 31), (std::int64_t{1} << 31) - 1, "a constant");
    const auto [lo, hi] = std::minmax_element(entries.begin(), entries.end());
    values_.push_back(Value{array.dtype, array.shape, *lo, *hi});
    const auto* bytes = static_cast<const std::uint8_t*>(array.data);
    data_.emplace_back(bytes, bytes + values_.back().bytes());
    constant_bytes_ += data_.back().size();
    is_constant_.push_back(true), names_.emplace_back();
    return static_cast<int>(values_.size()) - 1;
}

int Engine::add(const std::string& name, const Record& record) {
    const std::lock_guard lock(running_);
    need(!finished(), "the program is finished");
    need(ops_.size() < MAX_OPS, "more ops than can be");
    std::unique_ptr<Op> op = make_op(record, {values_, is_constant_, machine_});
    op->output = static_cast<int>(values_.size());
    values_.push_back(op->value);
    is_constant_.push_back(false), data_.emplace_back(), names_.push_back(name);
    constant_bytes_ += op->bytes();
    ops_.push_back(std::move(op));
    return static_cast<int>(values_.size()) - 1;
}

void Engine::finish(int output, bool keep, const std::vector<int>& others) {
    const std::lock_guard lock(running_);
    need(!finished(), "the program is finished");
    std::vector<int> outputs{output};
    outputs.insert(outputs.end(), others.begin(), others.end());
    for (const int number : outputs) {
        need(number > 0 && number < static_cast<int>(values_.size()) && !is_constant_[static_cast<std::size_t>(number)],
             "the output is no buffer that an op writes");
        need(std::count(outputs.begin(), outputs.end(), number) == 1, "an output is there twice");
    }
    keep_ = keep;
    if (!keep) fuse(ops_, outputs, machine_);
    outputs_ = std::move(outputs);
    plan();
}

// Places buffers in one arena: the largest first, each at the lowest place where nothing that lives at the same time
// lies.
void Engine::plan() {
    struct Life {
        std::size_t value, size;
        int begin, end;
    };
    std::vector<Life> lives;
    const int last = static_cast<int>(ops_.size());
    std::vector<int> begin(values_.size(), -1), end(values_.size(), -1);
    begin[0] = 0, end[0] = 0;
    for (int i = 0; i < last; ++i) {
        const Op& op = *ops_[static_cast<std::size_t>(i)];
        begin[static_cast<std::size_t>(op.output)] = i;
        end[static_cast<std::size_t>(op.output)] = i;
        for (const int in : op.inputs) end[static_cast<std::size_t>(in)] = i;
        scratch_bytes_ = std::max(scratch_bytes_, op.scratch());
    }
    for (const int number : outputs_) end[static_cast<std::size_t>(number)] = last;
    for (std::size_t v = 0; v < values_.size(); ++v) {
        if (is_constant_[v] || begin[v] < 0) continue;
        lives.push_back({v, aligned(static_cast<std::size_t>(values_[v].bytes()) + 64), keep_ ? 0 : begin[v],
                         keep_ ? last : end[v]});
    }
    std::stable_sort(lives.begin(), lives.end(), [](const Life& a, const Life& b) { return a.size > b.size; });
    offsets_.assign(values_.size(), 0);
    std::vector<Life> placed;
    for (const Life& life : lives) {
        std::vector<std::pair<std::size_t, std::size_t>> taken;
        for (const Life& other : placed) {
            if (other.begin <= life.end && life.begin <= other.end)
                taken.emplace_back(offsets_[other.value], offsets_[other.value] + other.size);
        }
        std::sort(taken.begin(), taken.end());
        std::size_t at = 0;
        for (const auto& [from, to] : taken) {
            if (at + life.size <= from) break;
            at = std::max(at, to);
        }
        offsets_[life.value] = at;
        arena_bytes_ = std::max(arena_bytes_, at + life.size);
        placed.push_back(life);
    }
    scratch_bytes_ = aligned(scratch_bytes_ + 64);
}

// Made by the first run: loading a small file that declares large shapes costs no memory.
Engine::Lane& Engine::lane(std::size_t i) {
    while (static_cast<int>(scratch_.size()) < pool_.threads()) scratch_.emplace_back(scratch_bytes_);
    while (lanes_.size() <= i) {
        auto made = std::make_unique<Lane>();
        made->arena.resize(arena_bytes_);
        for (std::size_t v = 0; v < values_.size(); ++v) {
            made->frame.push_back(is_constant_[v] ? data_[v].data() : made->arena.data() + offsets_[v]);
        }
        lanes_.push_back(std::move(made));
    }
    return *lanes_[i];
}

// The image is copied: its owner may change it meanwhile, and ops that read a value twice rely on reading the same.
template <class Each>
void Engine::run_image(Lane& lane, const std::uint8_t* image, const Each& each) const {
    std::memcpy(lane.frame[0], image, static_cast<std::size_t>(this->image().bytes()));
    for (const std::unique_ptr<Op>& op : ops_) each(*op, lane.frame.data());
}

void Engine::copy_out(const Lane& lane, std::int64_t i, const std::vector<std::uint8_t*>& ys) const {
    for (std::size_t k = 0; k < ys.size(); ++k) {
        const std::int64_t bytes = value(outputs_[k]).bytes();
        std::memcpy(ys[k] + i * bytes, lane.frame[static_cast<std::size_t>(outputs_[k])],
                    static_cast<std::size_t>(bytes));
    }
}

void Engine::run(const std::uint8_t* images, std::int64_t count, std::uint8_t* y) { run_all(images, count, {y}); }

void Engine::run_all(const std::uint8_t* images, std::int64_t count, const std::vector<std::uint8_t*>& ys) {
    need(finished(), "the program is not finished");
    need(ys.size() <= outputs_.size(), "more arrays than outputs");
    const std::lock_guard lock(running_);
    run_locked(images, count, ys);
}

void Engine::run_kept(const std::uint8_t* image, const std::vector<int>& numbers,
                      const std::vector<std::uint8_t*>& ys) {
    need(finished(), "the program is not finished");
    for (const int number : numbers) need(keeps(number), "this engine keeps no such buffer");
    need(ys.size() == numbers.size(), "not one array a buffer");
    const std::lock_guard lock(running_);
    run_locked(image, 1, {});
    for (std::size_t i = 0; i < ys.size(); ++i)
        std::memcpy(ys[i], buffer(numbers[i]), static_cast<std::size_t>(value(numbers[i]).bytes()));
}

void Engine::run_locked(const std::uint8_t* images, std::int64_t count, const std::vector<std::uint8_t*>& ys) {
    const std::int64_t in = image().bytes(), threads = pool_.threads();
    // Whole images side by side as long as there is one for every thread; what is left, op by op on all of them.
    const std::int64_t side_by_side = threads == 1 ? count : count / threads * threads;
    if (side_by_side > 0) {
        lane(static_cast<std::size_t>(threads) - 1);
        pool_.run(side_by_side, 1, [&](int thread, std::int64_t begin, std::int64_t end) {
            for (std::int64_t i = begin; i < end; ++i) {
                std::uint8_t* scratch = scratch_[static_cast<std::size_t>(thread)].data();
                Lane& mine = *lanes_[static_cast<std::size_t>(thread)];
                run_image(mine, images + i * in,
                          [&](const Op& op, Frame frame) { op.run(frame, 0, op.items(), scratch); });
                copy_out(mine, i, ys);
            }
        });
    }
    for (std::int64_t i = side_by_side; i < count; ++i) {
        run_image(lane(0), images + i * in, [&](const Op& op, Frame frame) {
            const std::int64_t items = op.items();
            pool_.run(items, std::max<std::int64_t>(1, items / (threads * 4)),
                      [&](int thread, std::int64_t begin, std::int64_t end) {
                          op.run(frame, begin, end, scratch_[static_cast<std::size_t>(thread)].data());
                      });
        });
        copy_out(lane(0), i, ys);
    }
}

std::vector<OpTime> Engine::profile(const std::uint8_t* image, int rounds) {
    need(finished(), "the program is not finished");
    const std::lock_guard lock(running_);
    std::vector<OpTime> times;
    for (const std::unique_ptr<Op>& op : ops_)
        times.push_back({names_[static_cast<std::size_t>(op->output)], op->tag, 1e300, op->macs()});
    for (int round = 0; round < rounds; ++round) {
        std::size_t i = 0;
        run_image(lane(0), image, [&](const Op& op, Frame frame) {
            const auto start = std::chrono::steady_clock::now();
            op.run(frame, 0, op.items(), scratch_[0].data());
            const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
            times[i].seconds = std::min(times[i].seconds, seconds);  // the least disturbed round
            ++i;
        });
    }
    return times;
}

bool Engine::keeps(int number) const {
    return keep_ && number > 0 && number < static_cast<int>(values_.size()) &&
           !is_constant_[static_cast<std::size_t>(number)];
}

const std::uint8_t* Engine::buffer(int number) const {
    need(keeps(number), "this engine keeps no such buffer");
    need(!lanes_.empty(), "nothing has been run");
    return lanes_.front()->frame[static_cast<std::size_t>(number)];
}

}  // namespace fqvit
