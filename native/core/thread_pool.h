// A small pool: chunks of work taken from a counter, so that a core that is busy elsewhere takes fewer of them. Workers
// spin a little between jobs and then sleep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

namespace fqvit {

class Pool {
public:
    // Where the system gives fewer threads, it works with those.
    explicit Pool(int threads) : state_(std::make_unique<State>()), process_(process()) {
        std::vector<std::thread>& workers = state_->workers;
        workers.reserve(static_cast<std::size_t>(threads));
        try {
            for (int i = 1; i < threads; ++i) workers.emplace_back([state = state_.get(), i] { state->work(i); });
        } catch (const std::exception&) {  // no thread left, or no memory for one; those that are there wait for work
        }
    }
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    ~Pool() {
        if (forked()) {  // the threads are the parent's: nobody here can wake or join them
            static_cast<void>(state_.release());
            return;
        }
        state_->stopping.store(true);
        state_->next_generation();
        for (std::thread& worker : state_->workers) worker.join();
    }

    int threads() const { return static_cast<int>(state_->workers.size()) + 1; }

    // Calls task(thread, begin, end) for chunks of at most `grain` that cover 0..items, from this and the pool's
    // threads, and returns when all are done. One caller at a time; tasks do not throw.
    template <class Task>
    void run(std::int64_t items, std::int64_t grain, const Task& task) {
        State& s = *state_;
        if (s.workers.empty() || items <= grain || forked()) {
            if (items > 0) task(0, std::int64_t{0}, items);
            return;
        }
        s.call = [](const void* t, int thread, std::int64_t begin, std::int64_t end) {
            (*static_cast<const Task*>(t))(thread, begin, end);
        };
        s.task = &task;
        s.items = items, s.grain = grain;
        s.next.store(0, std::memory_order_relaxed);
        s.busy.store(static_cast<int>(s.workers.size()), std::memory_order_relaxed);
        s.next_generation();
        s.take(0);
        for (int spins = 0; s.busy.load(std::memory_order_acquire) != 0; ++spins) {
            if (spins < SPINS) {
                relax();
            } else {
                std::unique_lock lock(s.mutex);
                s.done.wait(lock, [&s] { return s.busy.load(std::memory_order_acquire) == 0; });
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

    static long process() {
#if defined(__unix__) || defined(__APPLE__)
        return static_cast<long>(getpid());
#else
        return 0;
#endif
    }

    // In a child process that copied this pool, there are no workers.
    bool forked() const { return process() != process_; }

    struct State {
        std::vector<std::thread> workers;
        std::mutex mutex;
        std::condition_variable wake, done;
        std::atomic<std::uint64_t> generation{0};
        std::atomic<bool> stopping{false};
        std::atomic<std::int64_t> next{0};
        std::atomic<int> busy{0};
        std::int64_t items = 0, grain = 1;
        const void* task = nullptr;
        void (*call)(const void*, int, std::int64_t, std::int64_t) = nullptr;

        void next_generation() {
            {
                const std::lock_guard lock(mutex);
                generation.fetch_add(1, std::memory_order_release);
            }
            wake.notify_all();
        }

        void take(int thread) {
            for (;;) {
                const std::int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
                if (begin >= items) return;
                call(task, thread, begin, begin + grain < items ? begin + grain : items);
            }
        }

        void work(int thread) {
            std::uint64_t seen = 0;
            for (;;) {
                int spins = 0;
                while (generation.load(std::memory_order_acquire) == seen) {
                    if (++spins < SPINS) {
                        relax();
                    } else {
                        std::unique_lock lock(mutex);
                        wake.wait(lock, [&] { return generation.load(std::memory_order_acquire) != seen; });
                    }
                }
                seen = generation.load(std::memory_order_acquire);
                if (stopping.load()) return;
                take(thread);
                if (busy.fetch_sub(1, std::memory_order_acq_rel) == 1) {
                    const std::lock_guard lock(mutex);
                    done.notify_one();
                }
            }
        }
    };

    std::unique_ptr<State> state_;
    long process_;
};

}  // namespace fqvit
