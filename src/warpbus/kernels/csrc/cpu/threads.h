// Threads for parallel regions that follow each other within microseconds.
//
// To wake a sleeping thread takes longer than many a region, so threads that have nothing to do look out for the next
// region for a while before they sleep. They yield the core meanwhile: where there are fewer cores than threads that
// want to run, a thread that only spins would keep the one that it waits for from running.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

constexpr int kSpins = 64;  // looks before the first yield
constexpr std::chrono::microseconds kAwake{200};

// Look until done() or, if `limited`, until kAwake has passed; gives done().
template <typename Done>
bool watch(const Done& done, bool limited) {
    for (int i = 0; i < kSpins; ++i) {
        if (done()) return true;
    }
    const auto start = std::chrono::steady_clock::now();
    while (!done()) {
        if (limited && std::chrono::steady_clock::now() - start > kAwake) return false;
        sched_yield();
    }
    return true;
}

// The threads of a process, which are made when they are first needed and never end.
class Pool {
  public:
    // The pool of this process; one that was inherited by a fork has no threads, and is not used.
    static Pool& own() {
        static std::once_flag registered;
        std::call_once(registered, [] { pthread_atfork(nullptr, nullptr, [] { current().store(nullptr); }); });
        Pool* found = current().load();
        if (found) return *found;
        Pool* made = new Pool;
        if (current().compare_exchange_strong(found, made)) return *made;
        delete made;
        return *found;
    }

    // Run body(data) in so many threads, the calling one among them. While another thread's region runs, the calling
    // thread is alone: returns false, and has done nothing.
    bool run(int threads, void (*body)(void*), void* data) {
        std::unique_lock<std::mutex> only(regions_, std::try_to_lock);
        if (!only) return false;
        for (; workers_ < threads - 1; ++workers_) {
            std::thread(&Pool::work, this, workers_, region_.load()).detach();
        }
        body_ = body;
        data_ = data;
        working_.store(threads - 1);
        region_.store(((region_.load() >> kShift) + 1) << kShift | static_cast<uint64_t>(threads));
        if (asleep_.load() > 0) {
            { std::lock_guard<std::mutex> lock(sleeping_); }
            woken_.notify_all();
        }
        body(data);
        watch([&] { return working_.load() == 0; }, false);
        return true;
    }

  private:
    static constexpr int kShift = 16;  // of a region's number; its threads are below

    static std::atomic<Pool*>& current() {
        static std::atomic<Pool*> pool{nullptr};
        return pool;
    }

    void work(int index, uint64_t last) {
        for (;;) {
            const auto begun = [&] { return region_.load() != last; };
            if (!watch(begun, true)) {
                std::unique_lock<std::mutex> lock(sleeping_);
                ++asleep_;
                woken_.wait(lock, begun);
                --asleep_;
            }
            last = region_.load();
            if (index + 1 < static_cast<int>(last & ((1 << kShift) - 1))) {
                body_(data_);
                --working_;
            }
        }
    }

    std::mutex regions_, sleeping_;
    std::condition_variable woken_;
    std::atomic<uint64_t> region_{0};
    std::atomic<int> working_{0}, asleep_{0};
    void (*body_)(void*) = nullptr;
    void* data_ = nullptr;
    int workers_ = 0;
};

// The shared state of a region's threads. Its body has phases; each ends with wait().
class Team {
  public:
    explicit Team(int threads) : threads_(threads < 1 ? 1 : threads) {}

    int threads() const { return threads_; }

    // Run body(*this) in every thread.
    template <typename Body>
    void run(const Body& body) {
        struct Call {
            const Body* body;
            Team* team;
        } call{&body, this};
        const auto enter = [](void* data) {
            const Call* call = static_cast<const Call*>(data);
            (*call->body)(*call->team);
        };
        if (threads_ > 1 && Pool::own().run(threads_, enter, &call)) return;
        threads_ = 1;
        enter(&call);
    }

    // Do each of the `count` items of a phase in some thread: item(index).
    template <typename Item>
    void share(int phase, int64_t count, const Item& item) {
        for (int64_t i = next_[phase]++; i < count; i = next_[phase]++) item(i);
    }

    // Wait until all threads are here.
    void wait() {
        if (threads_ == 1) return;
        const int round = round_.load();
        if (++arrived_ == threads_) {
            arrived_.store(0);
            ++round_;
        } else {
            watch([&] { return round_.load() != round; }, false);
        }
    }

  private:
    int threads_;
    std::atomic<int64_t> next_[8]{};  // of each phase, the first item that no thread has taken
    std::atomic<int> arrived_{0}, round_{0};
};
