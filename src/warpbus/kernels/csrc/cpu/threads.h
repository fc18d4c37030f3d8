// Parallel regions on torch's own threads: those of the OpenMP library that torch has loaded, by the entry points that
// compilers call. Without such a library, the calling thread does everything.
#pragma once

#include <atomic>
#include <cstdint>

extern "C" {
void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags) __attribute__((weak));
void GOMP_barrier() __attribute__((weak));
}

// What the threads of a region share. `body` has phases; each ends with wait().
class Team {
  public:
    explicit Team(int threads) : threads_(GOMP_parallel && GOMP_barrier ? threads : 1) {}

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
        if (threads_ > 1) {
            GOMP_parallel(enter, &call, static_cast<unsigned>(threads_), 0);
        } else {
            enter(&call);
        }
    }

    // Do each of the `count` items of a phase in some thread: item(index).
    template <typename Item>
    void share(int phase, int64_t count, const Item& item) {
        for (int64_t i = next_[phase]++; i < count; i = next_[phase]++) item(i);
    }

    void wait() {
        if (threads_ > 1) GOMP_barrier();
    }

  private:
    int threads_;
    std::atomic<int64_t> next_[8]{};  // of each phase, the first item that no thread has taken
};
