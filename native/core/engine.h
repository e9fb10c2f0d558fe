// An integer program that is ready to run: verified, its weights packed, its ops fused and its arena planned.
//
//   Engine engine(program, {.threads = 2});
//   engine.run(images, count, logits);
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/value.h"
#include "ir/program.h"

namespace fqvit {

// Returns the instruction sets that this build contains and this CPU supports, fastest first:
// avx512_vnni, avx_vnni, avx2, neon_i8mm, neon_dotprod, neon, relaxed_simd, simd128, scalar.
std::vector<std::string> instruction_sets();

struct OpTime {
    std::string name, tag;  // name: the buffer that the op writes
    double seconds;         // of the fastest round
    std::int64_t macs;      // multiply-accumulates of matrix products
};

// Called after each op of a run, for measurements. name: the buffer that the op wrote   macs: as in OpTime
using OpDone = std::function<void(const std::string& name, const std::string& tag, std::int64_t macs)>;

class WeightStore;
class ThreadPool;
class RunMemory;

struct EngineOptions {
    std::string instruction_set{};  // one of instruction_sets(), or "" for the fastest
    int threads = 1;                // clamped to 1..256
    bool keep_buffers = false;      // fuse nothing and keep every buffer readable after a run of one image
    // Limit on run_bytes(). The constructor checks it; the memory is allocated by the first run.
    std::int64_t max_run_bytes = std::int64_t{512} << 20;
    // Packed weights that programs share; null: the engine keeps its own. Must only be used with one instruction set.
    std::shared_ptr<WeightStore> weights = nullptr;
    // Threads and memory that engines share if their callers run one of them at a time; null: the engine has its own.
    std::shared_ptr<ThreadPool> pool = nullptr;  // instead of `threads`
    std::shared_ptr<RunMemory> memory = nullptr;
};

// Safe to call from several threads: calls on one engine run one after the other. Errors throw BadProgram and leave the
// engine unchanged.
class Engine {
public:
    // Verifies the program completely, by the same rules as Program.verify in src/fqvit/ir/program.py, and packs it.
    // Throws BadProgram if it does not verify ("<op>: <problem>") or needs more than max_run_bytes. The constants are
    // not read after the constructor returns.
    Engine(const Program& program, const EngineOptions& options);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // images: u8 [count, *image]. y: [count, *output().shape].
    void run(const std::uint8_t* images, std::int64_t count, std::uint8_t* y);
    // ys: one array per output, in the order of outputs(); fewer arrays return the first outputs only.
    void run_all(const std::uint8_t* images, std::int64_t count, const std::vector<std::uint8_t*>& ys);
    // Runs one image without copies: the caller writes it to input(), calls run_in_place() and reads output_data(i),
    // the i-th output. Both addresses are valid until the next run, or until another engine uses the shared memory.
    std::uint8_t* input();
    void run_in_place(const OpDone& done = nullptr);
    const std::uint8_t* output_data(std::size_t i) const;
    // Runs one image and copies the values `numbers` to the arrays `ys`. Needs keep_buffers.
    void run_buffers(const std::uint8_t* image, const std::vector<int>& numbers, const std::vector<std::uint8_t*>& ys);
    // Runs one image `rounds` times on one thread and times every op.
    std::vector<OpTime> profile(const std::uint8_t* image, int rounds);

    // Values are numbered: 0 is the image. Returns -1 if there is no buffer of this name.
    int find(const std::string& buffer) const;
    const Value& value(int number) const;
    const Value& image() const { return value(0); }
    const Value& output() const { return value(outputs().front()); }
    const std::vector<int>& outputs() const;
    bool keeps(int number) const;                  // whether buffer() can return this value
    const std::uint8_t* buffer(int number) const;  // valid until the next run. Needs keep_buffers
    const char* instruction_set() const;
    std::int64_t macs() const;  // multiply-accumulates of the matrix products, per image
    int threads() const;
    std::uint64_t arena_bytes() const;   // buffers of one image
    std::uint64_t run_bytes() const;     // arena and scratch of one image
    std::size_t constant_bytes() const;  // packed weights and other constants, shared ones included

private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace fqvit
