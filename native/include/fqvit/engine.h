// An integer program that is ready to run. The caller adds ops one by one; add() checks each op and packs its weights.
// finish() then fuses ops and plans the arena, and run() computes images.
//
//   Engine engine({224, 224, 3}, "", 2);
//   const int y = engine.add("y", record);
//   engine.finish(y, false);
//   engine.run(images, count, logits);
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fqvit/record.h"
#include "fqvit/value.h"

namespace fqvit {

// Returns the instruction sets that this build contains and this CPU supports, fastest first:
// avx512_vnni, avx_vnni, avx2, neon_dotprod, scalar.
std::vector<std::string> instruction_sets();

struct OpTime {
    std::string name, tag;  // name: the buffer that the op writes
    double seconds;         // of the fastest round
    std::int64_t macs;      // multiply-accumulates of matrix products
};

// Safe to call from several threads: calls on one engine run one after the other. Errors throw BadProgram and leave the
// engine unchanged.
class Engine {
public:
    // image: [height, width, channels] of the u8 input. instruction_set: one of instruction_sets(), or "" for the
    // fastest. threads: clamped to 1..256.
    Engine(Shape image, const std::string& instruction_set, int threads);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // Values are numbered: 0 is the image, then each call of constant() or add() returns the next number.
    int constant(const Array& array);
    int add(const std::string& name, const Record& record);
    // Ends loading. keep_buffers: fuse nothing and keep every buffer readable after a run of one image. others:
    // further outputs, which run_all() returns after `output`.
    void finish(int output, bool keep_buffers, const std::vector<int>& others = {});

    // images: u8 [count, *image]. y: [count, *output().shape].
    void run(const std::uint8_t* images, std::int64_t count, std::uint8_t* y);
    // ys: one array per output, in the order of outputs(); fewer arrays return the first outputs only.
    void run_all(const std::uint8_t* images, std::int64_t count, const std::vector<std::uint8_t*>& ys);
    // Runs one image and copies the buffers `numbers` to the arrays `ys`. Needs keep_buffers.
    void run_buffers(const std::uint8_t* image, const std::vector<int>& numbers, const std::vector<std::uint8_t*>& ys);
    // Runs one image `rounds` times on one thread and times every op.
    std::vector<OpTime> profile(const std::uint8_t* image, int rounds);

    bool finished() const;
    const Value& value(int number) const;
    const Value& image() const { return value(0); }
    const Value& output() const { return value(outputs().front()); }
    const std::vector<int>& outputs() const;
    bool keeps(int number) const;                  // whether buffer() can return this value
    const std::uint8_t* buffer(int number) const;  // valid until the next run. Needs keep_buffers
    const char* instruction_set() const;
    int threads() const;
    std::size_t arena_bytes() const;     // buffers of one image
    std::size_t run_bytes() const;       // arena and scratch of one image
    std::size_t constant_bytes() const;  // packed weights and other constants

private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace fqvit
