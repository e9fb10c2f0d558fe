// Counts the calls that run without Python's global interpreter lock (GIL), so that forks and interpreter shutdown are
// safe.
//  - fork: the child has only the thread that forked. A lock that another thread holds, or data that
//    it has half written, would stay in that state forever, so the fork waits until no call runs.
//  - interpreter shutdown: Python terminates a thread that asks for the GIL during shutdown, and C++ turns that into
//    abort(). Therefore such a thread sleeps until the process exits.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace fqvit {

class Gate {
public:
    // enter() and leave() surround a call. Both run without the GIL.
    void enter() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return !closed_; });
        ++running_;
    }
    void leave() {
        std::unique_lock lock(mutex_);
        --running_;
        const bool sleep = ended_ && std::this_thread::get_id() != last_;
        if (!sleep) ++returning_;
        changed_.notify_all();
        lock.unlock();
        while (sleep) std::this_thread::sleep_for(std::chrono::hours(1));
    }
    // Called after leave(), with the GIL.
    void returned() {
        const std::lock_guard lock(mutex_);
        --returning_;
        changed_.notify_all();
    }

    // Waits until no call runs and blocks new calls until open(). Called without the GIL.
    void close() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return !closed_; });
        closed_ = true;
        changed_.wait(lock, [this] { return running_ == 0; });
    }
    void open() {
        const std::lock_guard lock(mutex_);
        closed_ = false;
        changed_.notify_all();
    }

    // From here on, only the calling thread may ask for the GIL again. Called without the GIL.
    void end() {
        std::unique_lock lock(mutex_);
        ended_ = true, last_ = std::this_thread::get_id();
        changed_.wait(lock, [this] { return returning_ == 0; });
    }

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    int running_ = 0, returning_ = 0;
    bool closed_ = false, ended_ = false;
    std::thread::id last_;
};

}  // namespace fqvit
