#include "fqvit/engine.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>

#include "core/aligned.h"
#include "core/arena.h"
#include "core/fuse.h"
#include "core/thread_pool.h"
#include "ops/op.h"
#include "ops/record.h"

namespace fqvit {

struct Engine::State {
    State(const KernelSet& kernels, int threads) : kernels(kernels), pool(threads) {}

    // Memory for one image, and the address of every value in it.
    struct Workspace {
        AlignedVector<std::uint8_t> arena;
        std::vector<std::uint8_t*> frame;
    };

    bool finished() const { return !outputs.empty(); }
    bool is_buffer(int number) const;
    int add_value(Value value, std::string name, bool constant);
    void plan();
    Workspace& workspace(std::size_t i);
    template <class RunOp>
    void run_image(Workspace& workspace, const std::uint8_t* image, const RunOp& run_op) const;
    void copy_outputs(const Workspace& workspace, std::int64_t i, const std::vector<std::uint8_t*>& ys) const;
    void run(const std::uint8_t* images, std::int64_t count, const std::vector<std::uint8_t*>& ys);

    const KernelSet kernels;
    ThreadPool pool;
    // One entry per value.
    std::vector<Value> values;
    std::vector<bool> is_constant;
    std::vector<AlignedVector<std::uint8_t>> data;  // constants; empty for buffers
    std::vector<std::string> names;                 // buffers; empty for constants
    std::vector<std::size_t> offsets;               // buffers, in the arena
    std::vector<std::unique_ptr<Op>> ops;
    std::vector<int> outputs;  // empty until finish()
    bool keep_buffers = false;
    std::size_t arena_bytes = 0, scratch_bytes = 0, constant_bytes = 0;
    std::vector<std::unique_ptr<Workspace>> workspaces;
    std::vector<AlignedVector<std::uint8_t>> scratch;  // one per thread
    std::mutex mutex;                                  // held by every call that changes or runs the engine
};

bool Engine::State::is_buffer(int number) const {
    return number > 0 && number < static_cast<int>(values.size()) && !is_constant[static_cast<std::size_t>(number)];
}

int Engine::State::add_value(Value value, std::string name, bool constant) {
    values.push_back(std::move(value));
    is_constant.push_back(constant), data.emplace_back(), names.push_back(std::move(name));
    return static_cast<int>(values.size()) - 1;
}

// Computes the lifetime of every buffer and assigns its offset in the arena.
void Engine::State::plan() {
    constexpr int UNUSED = -1;
    const int end = static_cast<int>(ops.size());
    std::vector<Lifetime> lifetimes(values.size(), Lifetime{0, UNUSED, UNUSED});
    lifetimes[0].first = lifetimes[0].last = 0;
    for (int i = 0; i < end; ++i) {
        const Op& op = *ops[static_cast<std::size_t>(i)];
        Lifetime& y = lifetimes[static_cast<std::size_t>(op.output)];
        y.first = y.last = i;
        for (const int input : op.inputs) lifetimes[static_cast<std::size_t>(input)].last = i;
        scratch_bytes = std::max(scratch_bytes, op.scratch());
    }
    for (const int number : outputs) lifetimes[static_cast<std::size_t>(number)].last = end;
    std::vector<std::size_t> numbers;  // values that need memory: not constants, nor buffers that fusion removed
    std::vector<Lifetime> buffers;
    for (std::size_t v = 0; v < values.size(); ++v) {
        Lifetime life = lifetimes[v];
        if (is_constant[v] || life.first == UNUSED) continue;
        if (keep_buffers) life.first = 0, life.last = end;
        // Vector loads may read up to 64 bytes past the end.
        life.bytes = round_up(static_cast<std::size_t>(values[v].bytes()) + 64, std::size_t{64});
        numbers.push_back(v), buffers.push_back(life);
    }
    const ArenaPlan arena = plan_arena(buffers);
    offsets.assign(values.size(), 0);
    for (std::size_t i = 0; i < numbers.size(); ++i) offsets[numbers[i]] = arena.offsets[i];
    arena_bytes = arena.bytes;
    scratch_bytes = round_up(scratch_bytes + 64, std::size_t{64});
}

// Allocates on the first run: loading a small file that declares large shapes costs no memory.
Engine::State::Workspace& Engine::State::workspace(std::size_t i) {
    while (static_cast<int>(scratch.size()) < pool.threads()) scratch.emplace_back(scratch_bytes);
    while (workspaces.size() <= i) {
        auto made = std::make_unique<Workspace>();
        made->arena.resize(arena_bytes);
        for (std::size_t v = 0; v < values.size(); ++v) {
            made->frame.push_back(is_constant[v] ? data[v].data() : made->arena.data() + offsets[v]);
        }
        workspaces.push_back(std::move(made));
    }
    return *workspaces[i];
}

// Copies the image first: its owner may change it during the run, and ops that read it twice need the same bytes.
template <class RunOp>
void Engine::State::run_image(Workspace& workspace, const std::uint8_t* image, const RunOp& run_op) const {
    std::memcpy(workspace.frame[0], image, static_cast<std::size_t>(values[0].bytes()));
    for (const std::unique_ptr<Op>& op : ops) run_op(*op, workspace.frame.data());
}

// Copies the outputs of image i to the caller's arrays.
void Engine::State::copy_outputs(const Workspace& workspace, std::int64_t i,
                                 const std::vector<std::uint8_t*>& ys) const {
    for (std::size_t k = 0; k < ys.size(); ++k) {
        const auto number = static_cast<std::size_t>(outputs[k]);
        const std::int64_t bytes = values[number].bytes();
        std::memcpy(ys[k] + i * bytes, workspace.frame[number], static_cast<std::size_t>(bytes));
    }
}

// Runs one whole image per thread while there is an image for every thread. The remaining images run one by one, each
// op shared by all threads. One thread computes each output element completely, so the bits do not depend on the split.
void Engine::State::run(const std::uint8_t* images, std::int64_t count, const std::vector<std::uint8_t*>& ys) {
    const std::int64_t image_bytes = values[0].bytes(), threads = pool.threads();
    const std::int64_t parallel_images = threads == 1 ? count : count / threads * threads;
    if (parallel_images > 0) {
        workspace(static_cast<std::size_t>(threads) - 1);
        pool.run(parallel_images, 1, [&](int thread, std::int64_t begin, std::int64_t end) {
            for (std::int64_t i = begin; i < end; ++i) {
                std::uint8_t* own_scratch = scratch[static_cast<std::size_t>(thread)].data();
                Workspace& own = *workspaces[static_cast<std::size_t>(thread)];
                run_image(own, images + i * image_bytes,
                          [&](const Op& op, Frame frame) { op.run(frame, 0, op.items(), own_scratch); });
                copy_outputs(own, i, ys);
            }
        });
    }
    for (std::int64_t i = parallel_images; i < count; ++i) {
        run_image(workspace(0), images + i * image_bytes, [&](const Op& op, Frame frame) {
            const std::int64_t items = op.items(), chunk = std::max<std::int64_t>(1, items / (threads * 4));
            pool.run(items, chunk, [&](int thread, std::int64_t begin, std::int64_t end) {
                op.run(frame, begin, end, scratch[static_cast<std::size_t>(thread)].data());
            });
        });
        copy_outputs(workspace(0), i, ys);
    }
}

namespace {

constexpr const char* FINISHED = "engine: finish() was called already, expected no more ops, constants or outputs";
constexpr const char* NOT_FINISHED = "engine: the program is not complete, expected a call of finish() before a run";

}  // namespace

Engine::Engine(Shape image, const std::string& instruction_set, int threads)
    : state_(std::make_unique<State>(select_kernels(instruction_set), std::clamp(threads, 1, 256))) {
    require(image.size() == 3, "image: ", image.size(), " axes, expected 3: height, width, channels");
    elements(image);  // throws if the image is too large
    state_->add_value(Value{DType::u8, std::move(image), 0, 255}, "pixels", false);
}

Engine::~Engine() = default;

int Engine::constant(const Array& array) {
    State& s = *state_;
    const std::lock_guard lock(s.mutex);
    require(!s.finished(), FINISHED);
    require(!array.shape.empty() && array.shape.size() <= MAX_AXES && count_of(array) > 0, "constant: shape ",
            array.shape, ", expected 1 to ", MAX_AXES, " axes, none empty");
    require(array.dtype != DType::i8 && array.dtype != DType::i64, "constant: ", array.dtype,
            ", expected u8, u16, i16 or i32");
    const std::vector<std::int64_t> entries =
        read_integers(array, -(std::int64_t{1} << 31), (std::int64_t{1} << 31) - 1, "constant");
    const auto [lo, hi] = std::minmax_element(entries.begin(), entries.end());
    Value value{array.dtype, array.shape, *lo, *hi};
    const auto* bytes = static_cast<const std::uint8_t*>(array.data);
    AlignedVector<std::uint8_t> copy(bytes, bytes + value.bytes());
    const int number = s.add_value(std::move(value), "", true);
    s.constant_bytes += copy.size();
    s.data.back() = std::move(copy);
    return number;
}

int Engine::add(const std::string& name, const Record& record) {
    State& s = *state_;
    const std::lock_guard lock(s.mutex);
    require(!s.finished(), FINISHED);
    require(s.ops.size() < MAX_OPS, "too many ops: ", s.ops.size() + 1, ", at most ", MAX_OPS);
    std::unique_ptr<Op> op = make_op(record, {s.values, s.is_constant, s.kernels});
    op->output = s.add_value(op->value, name, false);
    s.constant_bytes += op->bytes();
    s.ops.push_back(std::move(op));
    return s.ops.back()->output;
}

void Engine::finish(int output, bool keep_buffers, const std::vector<int>& others) {
    State& s = *state_;
    const std::lock_guard lock(s.mutex);
    require(!s.finished(), FINISHED);
    std::vector<int> outputs{output};
    outputs.insert(outputs.end(), others.begin(), others.end());
    for (const int number : outputs) {
        require(s.is_buffer(number), "output: value ", number, ", expected a buffer that an op writes");
        require(std::count(outputs.begin(), outputs.end(), number) == 1, "output: value ", number,
                " is listed twice, expected every output once");
    }
    s.keep_buffers = keep_buffers;
    if (!keep_buffers) fuse(s.ops, outputs, s.kernels);
    s.outputs = std::move(outputs);
    s.plan();
}

void Engine::run(const std::uint8_t* images, std::int64_t count, std::uint8_t* y) { run_all(images, count, {y}); }

void Engine::run_all(const std::uint8_t* images, std::int64_t count, const std::vector<std::uint8_t*>& ys) {
    State& s = *state_;
    require(s.finished(), NOT_FINISHED);
    require(ys.size() <= s.outputs.size(), "engine: expected at most one array per output, got ", ys.size(), " for ",
            s.outputs.size(), " outputs");
    const std::lock_guard lock(s.mutex);
    s.run(images, count, ys);
}

void Engine::run_buffers(const std::uint8_t* image, const std::vector<int>& numbers,
                         const std::vector<std::uint8_t*>& ys) {
    State& s = *state_;
    require(s.finished(), NOT_FINISHED);
    require(ys.size() == numbers.size(), "engine: expected one array per buffer, got ", ys.size(), " for ",
            numbers.size(), " buffers");
    for (const int number : numbers) {
        require(keeps(number), "buffer: value ", number,
                " is not kept, expected a buffer of an engine finished with keep_buffers");
    }
    const std::lock_guard lock(s.mutex);
    s.run(image, 1, {});
    for (std::size_t i = 0; i < ys.size(); ++i) {
        std::memcpy(ys[i], buffer(numbers[i]), static_cast<std::size_t>(value(numbers[i]).bytes()));
    }
}

std::vector<OpTime> Engine::profile(const std::uint8_t* image, int rounds) {
    State& s = *state_;
    require(s.finished(), NOT_FINISHED);
    const std::lock_guard lock(s.mutex);
    std::vector<OpTime> times;
    for (const std::unique_ptr<Op>& op : s.ops) {
        times.push_back({s.names[static_cast<std::size_t>(op->output)], op->tag, 1e300, op->macs()});
    }
    for (int round = 0; round < rounds; ++round) {
        std::size_t i = 0;
        s.run_image(s.workspace(0), image, [&](const Op& op, Frame frame) {
            const auto start = std::chrono::steady_clock::now();
            op.run(frame, 0, op.items(), s.scratch[0].data());
            const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
            times[i].seconds = std::min(times[i].seconds, seconds);  // the round with the least interference
            ++i;
        });
    }
    return times;
}

bool Engine::finished() const { return state_->finished(); }
const Value& Engine::value(int number) const { return state_->values.at(static_cast<std::size_t>(number)); }
const std::vector<int>& Engine::outputs() const { return state_->outputs; }
bool Engine::keeps(int number) const { return state_->keep_buffers && state_->is_buffer(number); }

const std::uint8_t* Engine::buffer(int number) const {
    require(keeps(number), "buffer: value ", number,
            " is not kept, expected a buffer of an engine finished with keep_buffers");
    require(!state_->workspaces.empty(), "buffer: the engine has not run yet, expected a call of run() first");
    return state_->workspaces.front()->frame[static_cast<std::size_t>(number)];
}

const char* Engine::instruction_set() const { return state_->kernels.name; }
int Engine::threads() const { return state_->pool.threads(); }
std::size_t Engine::arena_bytes() const { return state_->arena_bytes; }
std::size_t Engine::run_bytes() const { return state_->arena_bytes + state_->scratch_bytes; }
std::size_t Engine::constant_bytes() const { return state_->constant_bytes; }

}  // namespace fqvit
