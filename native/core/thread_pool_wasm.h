// The thread pool of WebAssembly modules without threads: the caller computes everything.
#pragma once

#include <cstdint>

namespace fqvit {

class ThreadPool {
public:
    explicit ThreadPool(int) {}
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int threads() const { return 1; }

    template <class Task>
    void run(std::int64_t items, std::int64_t, const Task& task) {
        if (items > 0) task(0, std::int64_t{0}, items);
    }
};

}  // namespace fqvit
