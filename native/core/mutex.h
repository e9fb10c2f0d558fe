// The mutex of the engine. WebAssembly modules are called by one thread at a time: the workers of a module with threads
// only run chunks of the thread pool and never call the interface.
#pragma once

#include <mutex>

namespace fqvit {

#if defined(__wasm__)
class Mutex {
public:
    void lock() {}
    bool try_lock() { return true; }
    void unlock() {}
};
#else
using Mutex = std::mutex;
#endif

}  // namespace fqvit
