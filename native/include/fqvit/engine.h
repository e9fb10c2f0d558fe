// An integer program made ready to run: ops added one by one, each checked and packed at once, then planned and run on
// images.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/thread_pool.h"
#include "ops/ops.h"

namespace fqvit {

// Names: scalar, avx2, avx_vnni, avx512_vnni, neon_dotprod. All that this build has and this CPU can run, best first.
std::vector<std::string> instruction_sets();
Machine machine_of(const std::string& name);  // "" is the best; BadProgram where it cannot run here

struct OpTime {
    std::string name, tag;  // name: the buffer it writes
    double seconds;         // of the fastest round
    std::int64_t macs;
};

class Engine {
public:
    // Takes u8 images of that shape. threads >= 1.
    Engine(Shape image, const std::string& instruction_set, int threads);

    int constant(const Array& array);  // a constant that ops read as a buffer -> its number
    int add(const std::string& name, const Record& record);
    // No op can be added afterwards. keep: every buffer stays readable after a run (of one image), and nothing is
    // fused. others: further values that run_all gives after `output`, each once.
    void finish(int output, bool keep, const std::vector<int>& others = {});

    // images: u8 [N, *image]; y: [N, *output.shape]. Calls from several threads wait for each other.
    void run(const std::uint8_t* images, std::int64_t count, std::uint8_t* y);
    // ys: one a value of outputs(), in that order.
    void run_all(const std::uint8_t* images, std::int64_t count, const std::vector<std::uint8_t*>& ys);
    // A run of one image by an engine that keeps: what these buffers hold after it, one array each.
    void run_kept(const std::uint8_t* image, const std::vector<int>& numbers, const std::vector<std::uint8_t*>& ys);
    std::vector<OpTime> profile(const std::uint8_t* image, int rounds);

    const Value& value(int number) const { return values_.at(static_cast<std::size_t>(number)); }
    bool keeps(int number) const;
    const std::uint8_t* buffer(int number) const;  // after a run of an engine that keeps, and before the next one
    const Value& output() const { return value(outputs_.front()); }
    const std::vector<int>& outputs() const { return outputs_; }
    const Value& image() const { return values_.front(); }
    bool finished() const { return !outputs_.empty(); }
    const Machine& machine() const { return machine_; }
    int threads() const { return pool_.threads(); }
    std::size_t arena_bytes() const { return arena_bytes_; }
    std::size_t run_bytes() const { return arena_bytes_ + scratch_bytes_; }  // of one image on its way
    std::size_t constant_bytes() const { return constant_bytes_; }           // of what ops keep

private:
    // Memory of one image on its way, and the pointers into it.
    struct Lane {
        AlignedVector<std::uint8_t> arena;
        std::vector<std::uint8_t*> frame;
    };

    void plan();
    void run_locked(const std::uint8_t* images, std::int64_t count, const std::vector<std::uint8_t*>& ys);
    Lane& lane(std::size_t i);
    template <class Each>
    void run_image(Lane& lane, const std::uint8_t* image, const Each& each) const;
    // What image number i gives, from its lane to the callers' arrays: of the first outputs, as many as there are
    // arrays.
    void copy_out(const Lane& lane, std::int64_t i, const std::vector<std::uint8_t*>& ys) const;

    Machine machine_;
    Pool pool_;
    std::vector<Value> values_;
    std::vector<bool> is_constant_;
    std::vector<AlignedVector<std::uint8_t>> data_;  // of constants; empty for buffers
    std::vector<std::string> names_;                 // of buffers
    std::vector<std::unique_ptr<Op>> ops_;
    std::vector<int> outputs_;  // none until finished
    bool keep_ = false;
    std::vector<std::size_t> offsets_;
    std::size_t arena_bytes_ = 0, scratch_bytes_ = 0, constant_bytes_ = 0;
    std::vector<std::unique_ptr<Lane>> lanes_;
    std::vector<AlignedVector<std::uint8_t>> scratch_;
    std::mutex running_;  // one call at a time, of whatever thread
};

}  // namespace fqvit
