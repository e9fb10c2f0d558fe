// A small pool: chunks of work taken from a counter, so that a core that is busy elsewhere takes fewer of them. Workers spin a
// little between jobs and then sleep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace fqvit {

class Pool {
public:
    explicit Pool(int threads) {
        for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
    }
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    ~Pool() {
        {
            const std::lock_guard lock(mutex_);
            stopping_ = true;
            generation_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        for (std::thread& worker : workers_) worker.join();
    }

    int threads() const { return static_cast<int>(workers_.size()) + 1; }

    // Calls task(thread, begin, end) for chunks of at most `grain` that cover 0..items, from this and the pool's threads, and
    // returns when all are done. One caller at a time; tasks do not throw.
    template <class Task>
    void run(std::int64_t items, std::int64_t grain, const Task& task) {
        if (workers_.empty() || items <= grain) {
            if (items > 0) task(0, std::int64_t{0}, items);
            return;
        }
        call_ = [](const void* t, int thread, std::int64_t begin, std::int64_t end) { (*static_cast<const Task*>(t))(thread, begin, end); };
        task_ = &task;
        items_ = items, grain_ = grain;
        next_.store(0, std::memory_order_relaxed);
        busy_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
        {
            const std::lock_guard lock(mutex_);
            generation_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        take(0);
        for (int spins = 0; busy_.load(std::memory_order_acquire) != 0; ++spins) {
            if (spins < SPINS) {
                relax();
            } else {
                std::unique_lock lock(mutex_);
                done_.wait(lock, [this] { return busy_.load(std::memory_order_acquire) == 0; });
            }
        }
    }

private:
    static constexpr int SPINS = 2000;

    static void relax() {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    void take(int thread) {
        for (;;) {
            const std::int64_t begin = next_.fetch_add(grain_, std::memory_order_relaxed);
            if (begin >= items_) return;
            call_(task_, thread, begin, begin + grain_ < items_ ? begin + grain_ : items_);
        }
    }

    void work(int thread) {
        std::uint64_t seen = 0;
        for (;;) {
            int spins = 0;
            while (generation_.load(std::memory_order_acquire) == seen) {
                if (++spins < SPINS) {
                    relax();
                } else {
                    std::unique_lock lock(mutex_);
                    wake_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen; });
                }
            }
            seen = generation_.load(std::memory_order_acquire);
            if (stopping_.load()) return;
            take(thread);
            if (busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
                const std::lock_guard lock(mutex_);
                done_.notify_one();
            }
        }
    }

    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    std::atomic<std::uint64_t> generation_{0};
    std::atomic<bool> stopping_{false};
    std::atomic<std::int64_t> next_{0};
    std::atomic<int> busy_{0};
    std::int64_t items_ = 0, grain_ = 1;
    const void* task_ = nullptr;
    void (*call_)(const void*, int, std::int64_t, std::int64_t) = nullptr;
};

}  // namespace fqvit
