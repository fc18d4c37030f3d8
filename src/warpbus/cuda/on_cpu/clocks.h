// Vector clocks: which accesses of a block happen before which, by barriers that not all of its threads wait at.
//
// A thread's epoch counts its releases: arrivals at an mbarrier or a named barrier. Its clock holds, for each thread, the
// epoch up to which it knows what that thread did; it learns this from the barriers that it waits for. An engine counts
// asynchronous accesses in the same way: copies by the mbarrier that they report to, products by warpgroup, copies to
// device memory by thread. Several share an engine's number, so that a mistake may be missed, but none is made up.
#pragma once

#include "threads.h"

#include <unordered_map>

namespace {

using warpbus::current;
using warpbus::field;

constexpr unsigned kCopyEngines = 8, kProductEngines = 8, kStoreEngines = 8;
constexpr unsigned kEngines = 1 + kCopyEngines + kProductEngines + kStoreEngines;  // 0 is none

inline unsigned engine_of(warpbus::AsyncKind kind, uint64_t key) {
    switch (kind) {
        case warpbus::AsyncKind::copy: return 1 + key / 8 % kCopyEngines;
        case warpbus::AsyncKind::product: return 1 + kCopyEngines + key % kProductEngines;
        default: return 1 + kCopyEngines + kProductEngines + key % kStoreEngines;
    }
}
inline const char *engine_name(unsigned engine) {
    return engine <= kCopyEngines ? "copy" : engine <= kCopyEngines + kProductEngines ? "product" : "store";
}

using Clock = std::vector<uint32_t>;  // of the threads, then of the engines

class Clocks {
  public:
    // A block begins, or goes on where all that came before is ordered.
    void begin(unsigned threads) {
        if (threads != threads_ || used_) {
            threads_ = threads;
            known_.assign(threads, {});
            epochs_.assign(threads, 1);
            released_.clear();
            engines_.assign(kEngines, 0);
            synchronized_.assign(kEngines, 0);
            used_ = false;
        }
    }
    void use() { used_ = true; }
    uint32_t epoch(unsigned thread) const { return epochs_[thread]; }
    bool ordered(unsigned own, unsigned earlier, uint32_t epoch) const { return used_ && known(own, earlier) >= epoch; }
    bool ordered_engine(unsigned own, unsigned engine, uint32_t epoch) const {
        return synchronized_[engine] >= epoch || known(own, threads_ + engine) >= epoch;
    }

    void release(unsigned thread, const void *barrier) {
        used_ = true;
        Clock &of = released_[barrier];
        join(of, known_[thread]);
        at(of, thread) = std::max(at(of, thread), epochs_[thread]++);
    }
    void acquire(unsigned thread, const void *barrier) {
        if (const auto found = released_.find(barrier); found != released_.end()) join(known_[thread], found->second);
    }
    // The threads of a warp wait for each other.
    void join_warp(unsigned warp) {
        if (!used_) return;
        const unsigned first = warp * warpbus::kWarp, end = std::min(threads_, first + warpbus::kWarp);
        Clock all;
        for (unsigned thread = first; thread < end; ++thread) {
            join(all, known_[thread]);
            at(all, thread) = std::max(at(all, thread), epochs_[thread]++);
        }
        for (unsigned thread = first; thread < end; ++thread) known_[thread] = all;
    }
    // All threads of the block wait for each other: what one knows of the engines, all know.
    void join_block() {
        if (!used_) return;
        for (unsigned thread = 0; thread < threads_; ++thread)
            for (unsigned engine = 1; engine < kEngines; ++engine)
                synchronized_[engine] = std::max(synchronized_[engine], known(thread, threads_ + engine));
    }

    // An asynchronous access begins; its end is known to those that acquire a barrier, or to a thread that waited for it.
    uint32_t begin_access(unsigned engine) {
        used_ = true;
        return ++engines_[engine];
    }
    uint32_t last_access(unsigned engine) const { return engines_[engine]; }
    void end_access(const void *barrier, unsigned engine, uint32_t epoch) {
        uint32_t &known = at(released_[barrier], threads_ + engine);
        known = std::max(known, epoch);
    }
    void end_access(unsigned thread, unsigned engine, uint32_t epoch) {
        uint32_t &known = at(known_[thread], threads_ + engine);
        known = std::max(known, epoch);
    }

  private:
    uint32_t known(unsigned thread, unsigned of) const { return of < known_[thread].size() ? known_[thread][of] : 0; }
    uint32_t &at(Clock &clock, unsigned of) {
        if (clock.empty()) clock.resize(threads_ + kEngines);
        return clock[of];
    }
    static void join(Clock &to, const Clock &from) {
        if (to.size() < from.size()) to.resize(from.size());
        for (size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
    }

    unsigned threads_ = 0;
    bool used_ = false;  // whether there was more than barriers of the whole block
    std::vector<Clock> known_;
    std::vector<uint32_t> epochs_, engines_, synchronized_;  // `synchronized_`: what all threads know of the engines
    std::unordered_map<const void *, Clock> released_;
};

Clocks clocks;

}  // namespace
