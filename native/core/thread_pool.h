// A thread pool that splits work into chunks. Threads take one chunk after another, so a core that is busy with other
// programs computes fewer of them. Half of the threads take chunks from the start of the work, the other half from its
// end: with two threads, each one finds most rows of an op in its own cache, where it wrote them in the op before. A
// job ends when its chunks are done: the caller does not wait for workers that have not noticed the job. Between jobs,
// workers spin for a moment and then sleep.
#pragma once

#if defined(__wasm__) && !defined(__wasm_atomics__)
#include "core/thread_pool_wasm.h"
#else

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "core/threads.h"

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

namespace fqvit {

class ThreadPool {
public:
    // threads: the number of threads, including the caller's. If the system cannot start that many, the pool uses those
    // that were started.
    explicit ThreadPool(int threads) : state_(std::make_unique<State>()), process_(process()) {
        std::vector<Thread>& workers = state_->workers;
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
        state_->items.store(0);  // a worker that is still looking for chunks must not find any
        state_->start_job();
        for (Thread& worker : state_->workers) worker.join();
    }

    // The number of threads, including the caller's.
    int threads() const { return static_cast<int>(state_->workers.size()) + 1; }

    // Calls task(thread, begin, end) for chunks of `chunk` items (more if there would be over 65,535 chunks) that
    // together cover 0..items, on the caller's thread and the workers, and returns when all are done. Without workers,
    // one call covers all items. Only one thread at a time may call run(); the task must not throw.
    template <class Task>
    void run(std::int64_t items, std::int64_t chunk, const Task& task) {
        State& s = *state_;
        if (s.workers.empty() || items <= chunk || forked()) {
            if (items > 0) task(0, std::int64_t{0}, items);
            return;
        }
        const auto call = [](const void* t, int thread, std::int64_t begin, std::int64_t end) {
            (*static_cast<const Task*>(t))(thread, begin, end);
        };
        chunk = std::max(chunk, (items + State::MAX_CHUNKS - 1) / State::MAX_CHUNKS);
        s.close_job();
        s.call.store(call, std::memory_order_release);
        s.task.store(&task, std::memory_order_release);
        s.items.store(items, std::memory_order_release);
        s.chunk.store(chunk, std::memory_order_release);
        s.done_items.store(0, std::memory_order_relaxed);
        s.start_job();
        s.run_chunks(0);
        for (int spins = 0; s.done_items.load(std::memory_order_acquire) != items; ++spins) {
            if (spins < SPINS) {
                pause();
            } else {
                std::unique_lock lock(s.mutex);
                s.done.wait(lock, [&s, items] { return s.done_items.load(std::memory_order_acquire) == items; });
            }
        }
    }

private:
    static constexpr int SPINS = 2000 * SPIN_FACTOR;  // some 30 microseconds
    // Between jobs, workers spin, then let other threads run, then sleep.
    static constexpr int IDLE_SPINS = 1000 * SPIN_FACTOR, IDLE_YIELDS = 50;

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
        using Call = void (*)(const void*, int, std::int64_t, std::int64_t);

        std::vector<Thread> workers;
        ThreadMutex mutex;
        Condition wake, done;
        std::atomic<bool> stopping{false};
        // High half: the number of the job, modulo 2^32. Low half: CLOSED, or the numbers of chunks that were taken
        // from the start (low 16 bits) and from the end (high 16 bits). Threads take a chunk by compare-and-swap after
        // reading the fields below. If the swap succeeds, the fields that were read belong to the same job: the caller
        // closes the ticket before it changes the fields, and a thread that reads a changed field sees the ticket
        // closed.
        std::atomic<std::uint64_t> ticket{0};
        std::atomic<std::int64_t> items{0}, chunk{1}, done_items{0};
        std::atomic<const void*> task{nullptr};
        std::atomic<Call> call{nullptr};

        static constexpr std::uint64_t CLOSED = 0xffffffff;
        static constexpr std::int64_t MAX_CHUNKS = 0xffff;  // of one job

        std::uint64_t job() const { return ticket.load(std::memory_order_acquire) >> 32; }

        void close_job() { ticket.store(job() << 32 | CLOSED, std::memory_order_relaxed); }

        void start_job() {
            {
                const std::lock_guard lock(mutex);
                ticket.store((job() + 1) << 32, std::memory_order_release);
            }
            wake.notify_all();
        }

        // Computes chunks of the current job until none is left.
        void run_chunks(int thread) {
            std::uint64_t now = ticket.load(std::memory_order_acquire);
            for (;;) {
                const std::int64_t count = items.load(std::memory_order_acquire);
                const std::int64_t size = chunk.load(std::memory_order_acquire);
                const void* own_task = task.load(std::memory_order_acquire);
                const Call own_call = call.load(std::memory_order_acquire);
                if ((now & CLOSED) == CLOSED) return;
                const std::int64_t from_start = now & MAX_CHUNKS, from_end = now >> 16 & MAX_CHUNKS;
                const std::int64_t chunks = (count + size - 1) / size;
                if (from_start + from_end >= chunks) return;
                const bool at_end = thread % 2 == 1;
                const std::uint64_t next = now + (at_end ? MAX_CHUNKS + 1 : 1);
                if (!ticket.compare_exchange_weak(now, next, std::memory_order_acq_rel, std::memory_order_acquire)) {
                    continue;
                }
                const std::int64_t begin = (at_end ? chunks - 1 - from_end : from_start) * size;
                const std::int64_t end = begin + size < count ? begin + size : count;
                own_call(own_task, thread, begin, end);
                // The caller may return as soon as the last item is counted, so the job is not used after that.
                if (done_items.fetch_add(end - begin, std::memory_order_acq_rel) + end - begin == count) {
                    const std::lock_guard lock(mutex);
                    done.notify_one();
                    return;
                }
                now = ticket.load(std::memory_order_acquire);
            }
        }

        void worker_loop(int thread) {
            std::uint64_t seen = 0;
            for (;;) {
                for (int turns = 0; job() == seen; ++turns) {
                    if (turns < IDLE_SPINS) {
                        pause();
                    } else if (turns < IDLE_SPINS + IDLE_YIELDS) {
                        yield_thread();
                    } else {
                        std::unique_lock lock(mutex);
                        wake.wait(lock, [&] { return job() != seen; });
                    }
                }
                seen = job();
                if (stopping.load()) return;
                run_chunks(thread);
            }
        }
    };

    std::unique_ptr<State> state_;
    long process_;
};

}  // namespace fqvit

#endif
