// Threads of WebAssembly modules with shared memory, with the interface of the C++ thread library, which is not
// available there.
//
// A module cannot start threads. JavaScript starts workers, creates an instance of the module in each of them on the
// same memory, and calls fqvit_thread_run(i), which waits for work and does not return. fqvit_threads_reserve(n) tells
// the instance that loads models how many workers there are. A Thread borrows one of the workers until it is joined.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>

namespace fqvit {

constexpr int SPIN_FACTOR = 10;

inline void yield_thread() {}

// Sleeps until another thread notifies the address. Returns at once if the number there is no longer `old`. Never
// inlined: after the wait instruction, code of V8's baseline compiler in Node.js 20 reads a stale register, so the
// function must end with this instruction.
void wait_while_equal(std::int32_t* address, std::int32_t old);

// A 32-bit number on which threads sleep until it changes.
class Signal {
public:
    constexpr Signal() = default;
    explicit constexpr Signal(std::int32_t value) : value_(value) {}

    std::atomic<std::int32_t>& value() { return value_; }
    // Sleeps until wake_one() or wake_all(). Returns at once if the number is no longer `old`. May wake up spuriously.
    void wait(std::int32_t old) { wait_while_equal(address(), old); }
    void wake_one() { __builtin_wasm_memory_atomic_notify(address(), 1); }
    void wake_all() { __builtin_wasm_memory_atomic_notify(address(), UINT32_MAX); }

private:
    std::int32_t* address() { return reinterpret_cast<std::int32_t*>(&value_); }

    std::atomic<std::int32_t> value_{0};
    static_assert(sizeof(std::atomic<std::int32_t>) == sizeof(std::int32_t));
};

class ThreadMutex {
public:
    void lock() {
        std::int32_t found = FREE;
        if (state_.value().compare_exchange_strong(found, LOCKED)) return;
        if (found != AWAITED) found = state_.value().exchange(AWAITED);
        while (found != FREE) {
            state_.wait(AWAITED);
            found = state_.value().exchange(AWAITED);
        }
    }
    void unlock() {
        if (state_.value().exchange(FREE) == AWAITED) state_.wake_one();
    }

private:
    enum : std::int32_t { FREE, LOCKED, AWAITED };
    Signal state_;
};

class Condition {
public:
    template <class Lock, class Predicate>
    void wait(Lock& lock, const Predicate& is_true) {
        while (!is_true()) {
            const std::int32_t seen = count_.value().load();
            lock.unlock();
            count_.wait(seen);
            lock.lock();
        }
    }
    void notify_one() {
        count_.value().fetch_add(1);
        count_.wake_one();
    }
    void notify_all() {
        count_.value().fetch_add(1);
        count_.wake_all();
    }

private:
    Signal count_;
};

constexpr int MAX_THREADS = 16;  // including the one that loads models

// A worker that JavaScript has started.
struct ThreadSlot {
    enum : std::int32_t { MISSING, IDLE, BUSY };
    Signal state;
    void (*call)(void*) = nullptr;
    void* argument = nullptr;
};
extern ThreadSlot thread_slots[MAX_THREADS - 1];

class Thread {
public:
    // Throws std::bad_alloc if no worker is idle.
    template <class Function>
    explicit Thread(Function function) {
        auto copy = std::make_unique<Function>(std::move(function));
        for (ThreadSlot& slot : thread_slots) {
            if (slot.state.value().load() != ThreadSlot::IDLE) continue;
            slot.call = [](void* f) { (*static_cast<Function*>(f))(); };
            slot.argument = copy.get();
            free_argument_ = [](void* f) { delete static_cast<Function*>(f); };
            slot.state.value().store(ThreadSlot::BUSY);
            slot.state.wake_one();
            copy.release();
            slot_ = &slot;
            return;
        }
        throw std::bad_alloc();
    }
    Thread(Thread&& other) noexcept
        : slot_(std::exchange(other.slot_, nullptr)), free_argument_(other.free_argument_) {}
    Thread& operator=(Thread&&) = delete;

    void join() {
        while (slot_->state.value().load() == ThreadSlot::BUSY) slot_->state.wait(ThreadSlot::BUSY);
        free_argument_(slot_->argument);
        slot_ = nullptr;
    }

private:
    ThreadSlot* slot_ = nullptr;
    void (*free_argument_)(void*) = nullptr;
};

}  // namespace fqvit
