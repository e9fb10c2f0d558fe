// A thread pool that splits work into chunks. Threads fetch chunks from a shared counter, so a core that is busy with
// other programs computes fewer of them. Between jobs, workers spin for a moment and then sleep.
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

class ThreadPool {
public:
    // threads: including the caller's. If the system cannot start that many, the pool uses those that it could start.
    explicit ThreadPool(int threads) : state_(std::make_unique<State>()), process_(process()) {
        std::vector<std::thread>& workers = state_->workers;
        workers.reserve(static_cast<std::size_t>(threads));
        try {
            for (int i = 1; i < threads; ++i) {
                workers.emplace_back([state = state_.get(), i] { state->worker_loop(i); });
            }
        } catch (const std::exception&) {  // out of threads or memory
        }
    }
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    ~ThreadPool() {
        if (forked()) {  // the threads exist in the parent only, so they cannot be woken or joined here
            static_cast<void>(state_.release());
            return;
        }
        state_->stopping.store(true);
        state_->start_job();
        for (std::thread& worker : state_->workers) worker.join();
    }

    // The caller's thread counts as one.
    int threads() const { return static_cast<int>(state_->workers.size()) + 1; }

    // Calls task(thread, begin, end) for chunks of at most `chunk` items that together cover 0..items, on the caller's
    // thread and the workers, and returns when all are done. Without workers, one call covers all items. One caller at
    // a time; the task must not throw.
    template <class Task>
    void run(std::int64_t items, std::int64_t chunk, const Task& task) {
        State& s = *state_;
        if (s.workers.empty() || items <= chunk || forked()) {
            if (items > 0) task(0, std::int64_t{0}, items);
            return;
        }
        s.call = [](const void* t, int thread, std::int64_t begin, std::int64_t end) {
            (*static_cast<const Task*>(t))(thread, begin, end);
        };
        s.task = &task;
        s.items = items, s.chunk = chunk;
        s.next.store(0, std::memory_order_relaxed);
        s.busy.store(static_cast<int>(s.workers.size()), std::memory_order_relaxed);
        s.start_job();
        s.run_chunks(0);
        for (int spins = 0; s.busy.load(std::memory_order_acquire) != 0; ++spins) {
            if (spins < SPINS) {
                pause();
            } else {
                std::unique_lock lock(s.mutex);
                s.done.wait(lock, [&s] { return s.busy.load(std::memory_order_acquire) == 0; });
            }
        }
    }

private:
    static constexpr int SPINS = 2000;

    static void pause() {
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

    // Whether this process is a fork of the one that created the pool. Its copy of the pool has no workers.
    bool forked() const { return process() != process_; }

    struct State {
        std::vector<std::thread> workers;
        std::mutex mutex;
        std::condition_variable wake, done;
        std::atomic<std::uint64_t> job{0};  // counts jobs; a change wakes the workers
        std::atomic<bool> stopping{false};
        std::atomic<std::int64_t> next{0};  // first item of the next chunk
        std::atomic<int> busy{0};           // workers that have not finished the job
        std::int64_t items = 0, chunk = 1;
        const void* task = nullptr;
        void (*call)(const void*, int, std::int64_t, std::int64_t) = nullptr;

        void start_job() {
            {
                const std::lock_guard lock(mutex);
                job.fetch_add(1, std::memory_order_release);
            }
            wake.notify_all();
        }

        void run_chunks(int thread) {
            for (;;) {
                const std::int64_t begin = next.fetch_add(chunk, std::memory_order_relaxed);
                if (begin >= items) return;
                call(task, thread, begin, begin + chunk < items ? begin + chunk : items);
            }
        }

        void worker_loop(int thread) {
            std::uint64_t seen = 0;
            for (;;) {
                int spins = 0;
                while (job.load(std::memory_order_acquire) == seen) {
                    if (++spins < SPINS) {
                        pause();
                    } else {
                        std::unique_lock lock(mutex);
                        wake.wait(lock, [&] { return job.load(std::memory_order_acquire) != seen; });
                    }
                }
                seen = job.load(std::memory_order_acquire);
                if (stopping.load()) return;
                run_chunks(thread);
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
