#include "core/engine.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <set>

#include "core/aligned.h"
#include "core/arena.h"
#include "core/fuse.h"
#include "core/memory_size.h"
#include "core/mutex.h"
#include "core/run_memory.h"
#include "core/thread_pool.h"
#include "ops/op.h"
#include "ops/weights.h"

namespace fqvit {

struct Engine::State {
    State(const EngineOptions& options)
        : kernels(select_kernels(options.instruction_set)),
          pool(options.pool == nullptr ? std::make_shared<ThreadPool>(std::clamp(options.threads, 1, 256))
                                       : options.pool),
          memory(options.memory == nullptr ? std::make_shared<RunMemory>() : options.memory),
          keep_buffers(options.keep_buffers),
          weights(options.weights == nullptr ? std::make_shared<WeightStore>() : options.weights) {}

    // Memory for one image, and the address of every value in it.
    struct Workspace {
        std::uint8_t* arena = nullptr;
        std::vector<std::uint8_t*> frame{};
    };

    bool is_buffer(int number) const;
    void add_ops(const Program& program);
    void add_outputs(const Program& program);
    void plan();
    Workspace& workspace(std::size_t i);
    template <class RunOp>
    void run_image(Workspace& workspace, const std::uint8_t* image, const RunOp& run_op) const;
    void run_ops_in_parallel(Workspace& workspace, const OpDone& done = nullptr);
    void copy_outputs(const Workspace& workspace, std::int64_t i, const std::vector<std::uint8_t*>& ys) const;
    void run(const std::uint8_t* images, std::int64_t count, const std::vector<std::uint8_t*>& ys);

    const KernelSet kernels;
    std::shared_ptr<ThreadPool> pool;
    std::shared_ptr<RunMemory> memory;
    bool keep_buffers;
    std::shared_ptr<WeightStore> weights;
    Values values;
    std::vector<std::size_t> offsets;  // offset of each buffer in the arena
    std::vector<std::unique_ptr<Op>> ops;
    std::vector<int> outputs;
    std::uint64_t arena_bytes = 0;
    std::size_t scratch_bytes = 0, constant_bytes = 0;
    std::vector<Workspace> workspaces;
    std::vector<std::uint8_t*> scratch;  // one per thread
    Mutex mutex;                         // held by every call that changes or runs the engine
};

namespace {

// Parameters are expanded per op and channel, even if the file stores one number or several ops share a constant. They
// may take MAX_PARAMETER_BYTES, or MAX_EXPANSION times the bytes stored in the file, whichever is more.
constexpr std::uint64_t MAX_PARAMETER_BYTES = std::uint64_t{64} << 20, MAX_EXPANSION = 20;

bool is_packed(const OpFields& op) {
    const auto* linear = std::get_if<LinearFields>(&op);
    return linear != nullptr && linear->packed();
}

// Checks that weights_of names an earlier Linear with its own weights, stored in the same form, and for
// the same number of inputs.
// The inputs must be checked here: packed weights of K and of K + 1 inputs can have the same shape.
void check_owner(const LinearFields& op, const Scope& scope,
                 const std::map<std::string, const LinearFields*>& earlier) {
    if (!op.weights_of.has_value()) return;
    const auto found = earlier.find(*op.weights_of);
    require(found != earlier.end() && !found->second->weights_of.has_value(), "weights_of is '", *op.weights_of,
            "', expected an earlier linear op that has its own weights");
    const LinearFields& owner = *found->second;
    require(owner.group == op.group, "group is ", op.group, ", but '", *op.weights_of, "' (weights_of) has ",
            owner.group);
    require(owner.width == op.width, "width is ", op.width, ", but '", *op.weights_of, "' (weights_of) has ",
            owner.width);
    require(owner.codebooks == op.codebooks, "codebooks is ", op.codebooks, ", but '", *op.weights_of,
            "' (weights_of) has ", owner.codebooks);
    require(scope.codes(owner.x).value.channels() == scope.codes(op.x).value.channels(),
            "reads a different number of channels than '", *op.weights_of, "' (weights_of)");
}

void check_constants(const Program& program) {
    std::set<std::string, std::less<>> written{INPUT};
    for (const OpFields& op : program.ops) written.insert(output_of(op));
    for (const auto& [name, entry] : program.constants.entries()) {
        require(!written.contains(name), "constant '", name, "' has the name of a buffer");
        // An axis of size 0 counts as 1, as in the Python loader: numpy cannot create every shape with 0 elements.
        std::int64_t count = 1;
        bool fits = entry.shape.size() <= MAX_AXES;
        for (const std::int64_t size : entry.shape) {
            fits = fits && std::max<std::int64_t>(size, 1) <= MAX_ELEMENTS / count;
            if (fits) count *= std::max<std::int64_t>(size, 1);
        }
        require(fits, "constant '", name, "' has shape ", entry.shape, ", expected at most ", MAX_AXES, " axes and ",
                MAX_ELEMENTS, " elements");
    }
}

}  // namespace

bool Engine::State::is_buffer(int number) const {
    return number > 0 && number < static_cast<int>(values.values.size()) &&
           !values.is_constant[static_cast<std::size_t>(number)];
}

void Engine::State::add_ops(const Program& program) {
    require(program.ops.size() <= MAX_OPS, "too many ops: ", program.ops.size(), ", at most ", MAX_OPS);
    check_constants(program);
    // Only linear ops with packed weights may read the constants that store them: no other op can interpret these.
    std::set<std::string> packed;
    for (const OpFields& op : program.ops) {
        if (!is_packed(op)) continue;
        const auto& linear = std::get<LinearFields>(op);
        for (const char* part : linear.weight_parts()) packed.insert(linear.weight_part(part));
    }
    const std::set<std::string> none;
    const std::uint64_t stored = program.constants.stored_bytes();
    std::map<std::string, const LinearFields*> linears;
    for (const OpFields& fields : program.ops) {
        const std::string& name = output_of(fields);
        try {
            Scope scope(values, program.constants, is_packed(fields) ? none : packed, *weights, kernels);
            require(!values.numbers.contains(name), "written twice");
            if (const auto* linear = std::get_if<LinearFields>(&fields)) {
                check_owner(*linear, scope, linears);
                linears[name] = linear;
            }
            std::unique_ptr<Op> op = make_op(fields, scope);
            op->output = values.add(op->value, name, false);
            constant_bytes += op->bytes();
            const std::size_t taken = constant_bytes + weights->bytes();
            require(taken <= MAX_PARAMETER_BYTES || taken <= MAX_EXPANSION * stored, "parameters need ", taken >> 20,
                    " MB, but the file stores only ", stored, " bytes");
            ops.push_back(std::move(op));
        } catch (const BadProgramWithRemedy& error) {
            throw BadProgramWithRemedy(name + ": " + error.what());
        } catch (const BadFile&) {
            throw;
        } catch (const BadProgram& error) {
            throw BadProgram(name + ": " + error.what());
        }
    }
    for (const AlignedVector<std::uint8_t>& data : values.data) constant_bytes += data.size();
}

void Engine::State::add_outputs(const Program& program) {
    for (const std::string& name : program.outputs) {
        const auto found = values.numbers.find(name);
        require(found != values.numbers.end() && (found->second == 0 || is_buffer(found->second)),
                "output: no op writes '", name, "'");
        require(std::count(program.outputs.begin(), program.outputs.end(), name) == 1, "output: '", name,
                "' is listed as an output twice");
        outputs.push_back(found->second);
    }
    require(!outputs.empty(), "output: none, expected one or more");
}

// Computes the lifetime of every buffer and assigns its offset in the arena.
void Engine::State::plan() {
    constexpr int UNUSED = -1;
    const int end = static_cast<int>(ops.size());
    std::vector<Lifetime> lifetimes(values.values.size(), Lifetime{0, UNUSED, UNUSED});
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
    for (std::size_t v = 0; v < values.values.size(); ++v) {
        Lifetime life = lifetimes[v];
        if (values.is_constant[v] || life.first == UNUSED) continue;
        if (keep_buffers) life.first = 0, life.last = end;
        // Vector loads may read up to 64 bytes past the end.
        life.bytes = round_up(static_cast<std::size_t>(values.values[v].bytes()) + 64, std::size_t{64});
        numbers.push_back(v), buffers.push_back(life);
    }
    const ArenaPlan arena = plan_arena(buffers);
    offsets.assign(values.values.size(), 0);
    for (std::size_t i = 0; i < numbers.size(); ++i) offsets[numbers[i]] = static_cast<std::size_t>(arena.offsets[i]);
    arena_bytes = arena.bytes;
    scratch_bytes = round_up(scratch_bytes + 64, std::size_t{64});
}

// Allocates on the first run: loading a small file that declares large shapes costs no memory. The addresses are
// updated before every run, because another engine may have enlarged the shared memory.
Engine::State::Workspace& Engine::State::workspace(std::size_t i) {
    scratch.resize(static_cast<std::size_t>(pool->threads()));
    for (std::size_t t = 0; t < scratch.size(); ++t) scratch[t] = memory->scratch(t, scratch_bytes);
    if (workspaces.size() <= i) workspaces.resize(i + 1);
    for (std::size_t w = 0; w <= i; ++w) {
        Workspace& own = workspaces[w];
        std::uint8_t* arena = memory->arena(w, memory_size(arena_bytes));
        if (arena == own.arena && !own.frame.empty()) continue;
        own.arena = arena;
        own.frame.resize(values.values.size());
        for (std::size_t v = 0; v < own.frame.size(); ++v) {
            own.frame[v] = values.is_constant[v] ? values.data[v].data() : arena + offsets[v];
        }
    }
    return workspaces[i];
}

// Copies the image first: its owner may change it during the run, and ops that read it twice need the same bytes.
template <class RunOp>
void Engine::State::run_image(Workspace& workspace, const std::uint8_t* image, const RunOp& run_op) const {
    std::memcpy(workspace.frame[0], image, static_cast<std::size_t>(values.values[0].bytes()));
    for (const std::unique_ptr<Op>& op : ops) run_op(*op, workspace.frame.data());
}

// Copies the outputs of image i to the caller's arrays.
void Engine::State::copy_outputs(const Workspace& workspace, std::int64_t i,
                                 const std::vector<std::uint8_t*>& ys) const {
    for (std::size_t k = 0; k < ys.size(); ++k) {
        const auto number = static_cast<std::size_t>(outputs[k]);
        const std::int64_t bytes = values.values[number].bytes();
        std::memcpy(ys[k] + i * bytes, workspace.frame[number], static_cast<std::size_t>(bytes));
    }
}

// Runs one whole image per thread while there is an image for every thread. The remaining images run one by one, each
// op shared by all threads. Each output element is computed entirely by one thread, so the bits do not depend on the
// split.
void Engine::State::run(const std::uint8_t* images, std::int64_t count, const std::vector<std::uint8_t*>& ys) {
    const std::int64_t image_bytes = values.values[0].bytes(), threads = pool->threads();
    const std::int64_t parallel_images = threads == 1 ? count : count / threads * threads;
    if (parallel_images > 0) {
        workspace(static_cast<std::size_t>(threads) - 1);
        pool->run(parallel_images, 1, [&](int thread, std::int64_t begin, std::int64_t end) {
            for (std::int64_t i = begin; i < end; ++i) {
                std::uint8_t* own_scratch = scratch[static_cast<std::size_t>(thread)];
                Workspace& own = workspaces[static_cast<std::size_t>(thread)];
                run_image(own, images + i * image_bytes,
                          [&](const Op& op, Frame frame) { op.run(frame, 0, op.items(), own_scratch); });
                copy_outputs(own, i, ys);
            }
        });
    }
    for (std::int64_t i = parallel_images; i < count; ++i) {
        Workspace& own = workspace(0);
        std::memcpy(own.frame[0], images + i * image_bytes, static_cast<std::size_t>(image_bytes));
        run_ops_in_parallel(own);
        copy_outputs(own, i, ys);
    }
}

// Runs one image, each op shared by all threads.
void Engine::State::run_ops_in_parallel(Workspace& own, const OpDone& done) {
    for (const std::unique_ptr<Op>& op : ops) {
        // Small chunks, because at the end of an op all threads wait for the last chunk.
        const std::int64_t items = op->items(), chunk = std::max<std::int64_t>(1, items / (pool->threads() * 16));
        pool->run(items, chunk, [&](int thread, std::int64_t begin, std::int64_t end) {
            op->run(own.frame.data(), begin, end, scratch[static_cast<std::size_t>(thread)]);
        });
        if (done) done(values.names[static_cast<std::size_t>(op->output)], op->tag, op->macs());
    }
}

Engine::Engine(const Program& program, const EngineOptions& options) : state_(std::make_unique<State>(options)) {
    State& s = *state_;
    require(program.input.size() == 3 && elements(program.input) < MAX_ELEMENTS, "input shape ", program.input,
            ": expected height, width and channels with fewer than ", MAX_ELEMENTS, " elements");
    s.values.add(Value{DType::u8, program.input, 0, 255}, INPUT, false);
    s.add_ops(program);
    s.add_outputs(program);
    if (!s.keep_buffers) fuse(s.ops, s.outputs, s.kernels, options.weights == nullptr);
    s.plan();
    const auto needed = static_cast<std::int64_t>(run_bytes());
    require(needed <= options.max_run_bytes, "its buffers need ", needed >> 20, " MiB per image, at most ",
            options.max_run_bytes >> 20, " MiB are allowed");
}

Engine::~Engine() = default;

void Engine::run(const std::uint8_t* images, std::int64_t count, std::uint8_t* y) { run_all(images, count, {y}); }

void Engine::run_all(const std::uint8_t* images, std::int64_t count, const std::vector<std::uint8_t*>& ys) {
    State& s = *state_;
    require(ys.size() <= s.outputs.size(), "engine: expected at most one array per output, got ", ys.size(), " for ",
            s.outputs.size(), " outputs");
    const std::lock_guard lock(s.mutex);
    s.run(images, count, ys);
}

std::uint8_t* Engine::input() {
    const std::lock_guard lock(state_->mutex);
    return state_->workspace(0).frame[0];
}

void Engine::run_in_place(const OpDone& done) {
    const std::lock_guard lock(state_->mutex);
    state_->run_ops_in_parallel(state_->workspace(0), done);
}

const std::uint8_t* Engine::output_data(std::size_t i) const {
    require(!state_->workspaces.empty(), "output_data: the engine has not run yet, expected a call of run_in_place()");
    return state_->workspaces.front().frame[static_cast<std::size_t>(state_->outputs.at(i))];
}

void Engine::run_buffers(const std::uint8_t* image, const std::vector<int>& numbers,
                         const std::vector<std::uint8_t*>& ys) {
    State& s = *state_;
    require(ys.size() == numbers.size(), "engine: expected one array per buffer, got ", ys.size(), " for ",
            numbers.size(), " buffers");
    for (const int number : numbers) {
        require(keeps(number), "buffer: value ", number,
                " is not kept, expected a buffer of an engine with keep_buffers");
    }
    const std::lock_guard lock(s.mutex);
    s.run(image, 1, {});
    for (std::size_t i = 0; i < ys.size(); ++i) {
        std::memcpy(ys[i], buffer(numbers[i]), static_cast<std::size_t>(value(numbers[i]).bytes()));
    }
}

std::vector<OpTime> Engine::profile(const std::uint8_t* image, int rounds) {
    State& s = *state_;
    const std::lock_guard lock(s.mutex);
    std::vector<OpTime> times;
    for (const std::unique_ptr<Op>& op : s.ops) {
        times.push_back({s.values.names[static_cast<std::size_t>(op->output)], op->tag, 1e300, op->macs()});
    }
    for (int round = 0; round < rounds; ++round) {
        std::size_t i = 0;
        s.run_image(s.workspace(0), image, [&](const Op& op, Frame frame) {
            const auto start = std::chrono::steady_clock::now();
            op.run(frame, 0, op.items(), s.scratch[0]);
            const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
            times[i].seconds = std::min(times[i].seconds, seconds);  // the round with the least interference
            ++i;
        });
    }
    return times;
}

int Engine::find(const std::string& buffer) const {
    const auto found = state_->values.numbers.find(buffer);
    const bool is_buffer =
        found != state_->values.numbers.end() && (found->second == 0 || state_->is_buffer(found->second));
    return is_buffer ? found->second : -1;
}
const Value& Engine::value(int number) const { return state_->values.values.at(static_cast<std::size_t>(number)); }
const std::vector<int>& Engine::outputs() const { return state_->outputs; }
bool Engine::keeps(int number) const { return state_->keep_buffers && state_->is_buffer(number); }

const std::uint8_t* Engine::buffer(int number) const {
    require(keeps(number), "buffer: value ", number, " is not kept, expected a buffer of an engine with keep_buffers");
    require(!state_->workspaces.empty(), "buffer: the engine has not run yet, expected a call of run() first");
    return state_->workspaces.front().frame[static_cast<std::size_t>(number)];
}

const char* Engine::instruction_set() const { return state_->kernels.name; }
std::int64_t Engine::macs() const {
    std::int64_t sum = 0;
    for (const std::unique_ptr<Op>& op : state_->ops) sum += op->macs();
    return sum;
}
int Engine::threads() const { return state_->pool->threads(); }
std::uint64_t Engine::arena_bytes() const { return state_->arena_bytes; }
std::uint64_t Engine::run_bytes() const { return state_->arena_bytes + state_->scratch_bytes; }
std::size_t Engine::constant_bytes() const { return state_->constant_bytes + state_->weights->bytes(); }

}  // namespace fqvit
