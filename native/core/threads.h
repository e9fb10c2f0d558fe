// The primitives of the thread pool: those of the C++ library, or of WebAssembly modules with threads.
#pragma once

#if defined(__wasm__)
#include "core/threads_wasm.h"
#else

#include <condition_variable>
#include <mutex>
#include <thread>

namespace fqvit {

using Thread = std::thread;
using ThreadMutex = std::mutex;
using Condition = std::condition_variable;

// Multiplies the number of spins before a thread sleeps. WebAssembly has no pause instruction, so its spins are
// shorter and its factor is larger.
constexpr int SPIN_FACTOR = 1;

inline void yield_thread() { std::this_thread::yield(); }

}  // namespace fqvit

#endif
