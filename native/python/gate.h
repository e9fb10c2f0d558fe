// What all calls from Python that let go of its lock (the GIL) pass, so that two moments find them in order:
//  - fork: a child has only the thread that made it. What another one had locked or half written would stay so: fork
//  waits until
//    no call runs.
//  - the end of Python: a thread that then asks for the GIL is ended where it stands, which C++ answers with abort().
//  It sleeps
//    instead, until the process is gone.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace fqvit {

class Gate {
public:
    // Around a call, both without the GIL.
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
    // With the GIL again.
    void returned() {
        const std::lock_guard lock(mutex_);
        --returning_;
        changed_.notify_all();
    }

    // Nobody runs from here on, and nobody begins before open(). The GIL is free meanwhile.
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

    // No other thread asks for the GIL from here on; the last one, which calls this, goes on as before. The GIL is free
    // meanwhile.
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
