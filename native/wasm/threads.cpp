// The functions that JavaScript calls for threads. core/threads_wasm.h explains them.
#if defined(__wasm_atomics__)

#include "core/threads_wasm.h"

namespace fqvit {

constinit ThreadSlot thread_slots[MAX_THREADS - 1];

[[gnu::noinline]] void wait_while_equal(std::int32_t* address, std::int32_t old) {
    __builtin_wasm_memory_atomic_wait32(address, old, -1);
}

namespace {
constexpr int BLOCK_BYTES = 1 << 18;  // as in threads.S
}  // namespace

}  // namespace fqvit

extern "C" {

// The stack of each worker, which grows downwards, and below it its thread-local variables.
alignas(64) char fqvit_thread_blocks[fqvit::MAX_THREADS - 1][fqvit::BLOCK_BYTES];

// Tells the module that workers 0..count - 1 are in fqvit_thread_run() or about to call it. Returns how many it can
// use.
int fqvit_threads_reserve(int count) {
    using namespace fqvit;
    int reserved = 0;
    for (; reserved < count && reserved < MAX_THREADS - 1; ++reserved) {
        std::int32_t found = ThreadSlot::MISSING;
        thread_slots[reserved].state.value().compare_exchange_strong(found, ThreadSlot::IDLE);
    }
    return reserved;
}

// The body of fqvit_thread_run() in threads.S. Does not return: JavaScript ends the worker.
[[noreturn]] void fqvit_thread_loop(int i) {
    using namespace fqvit;
    ThreadSlot& slot = thread_slots[i];
    for (;;) {
        const std::int32_t found = slot.state.value().load();
        if (found != ThreadSlot::BUSY) {
            slot.state.wait(found);
            continue;
        }
        slot.call(slot.argument);
        slot.state.value().store(ThreadSlot::IDLE);
        slot.state.wake_all();
    }
}

}  // extern "C"

#endif
