// Streams, events and graphs of CUDA programs on a CPU.
//
// A stream is a queue: an operation waits there until the program waits for it, and then runs with the operations before
// it and those of the events that it waits for, and no others. So a program that reads a result too early gets the old
// bytes, and one that forgets an event gets another result. With WARPBUS_ORDER=reverse, all streams advance when the
// program waits for one: one operation of each, in turn, from the last stream to the first. So two streams that use one
// buffer disturb each other. Nothing overlaps: one operation runs at a time.
#pragma once

#include <chrono>

#include "threads.h"

struct warpbus_graph {
    std::vector<std::function<void()>> nodes;
    warpbus_stream *origin = nullptr;
    bool invalid = false;
};

struct warpbus_graph_exec { std::vector<std::function<void()>> nodes; };

struct warpbus_event {
    std::chrono::steady_clock::time_point at;
    uint64_t recorded = 0, done = 0;
    warpbus_stream *stream = nullptr;
    warpbus_graph *graph = nullptr;  // recorded while this graph was captured
    size_t position = 0;             // operations of the stream in the graph, at that time
};

struct warpbus_stream {
    std::vector<std::function<void()>> queue;
    size_t next = 0;
    bool blocking = true;            // the default stream waits for it
    warpbus_graph *graph = nullptr;  // what it captures
    size_t captured = 0, joined = 0; // operations in the graph, and those that the first stream waits for
};

namespace warpbus {

inline std::vector<warpbus_stream *> streams;
inline warpbus_graph *capturing;
inline std::map<const char *, size_t> pinned;  // page-locked host memory: its begin and size

inline bool step(warpbus_stream *stream) {
    if (stream->next == stream->queue.size()) {
        stream->queue.clear();
        stream->next = 0;
        return false;
    }
    const std::function<void()> operation = std::move(stream->queue[stream->next++]);
    operation();
    return true;
}

inline bool in_reverse() {
    const char *order = getenv("WARPBUS_ORDER");
    return order && !strcmp(order, "reverse");
}

// One operation of each stream, from the last to the first: of those that the default stream waits for, or of all.
inline bool step_each(bool all) {
    bool ran = false;
    for (size_t i = streams.size(); i-- > 0;)
        if (all || streams[i]->blocking) ran = step(streams[i]) || ran;
    return ran;
}

// Run a stream up to an event; without one, to its end.
inline void run_until(warpbus_stream *stream, const warpbus_event *event = nullptr, uint64_t version = 0) {
    while (!event || event->done < version) {
        if (in_reverse()) step_each(true);
        if (!step(stream)) break;
    }
}

inline void run_streams(bool all) {
    if (in_reverse())
        while (step_each(all)) {}
    for (size_t i = 0; i < streams.size(); ++i)
        if (all || streams[i]->blocking)
            while (step(streams[i])) {}
}

// Add an operation to a stream, or to the graph that it captures; the default stream runs it at once.
inline void enqueue(warpbus_stream *stream, std::function<void()> operation) {
    if (!stream) {
        run_streams(false);
        operation();
    } else if (stream->graph) {
        stream->graph->nodes.push_back(std::move(operation));
        ++stream->captured;
    } else {
        stream->queue.push_back(std::move(operation));
    }
}

// A call that a capture does not allow; it makes the graph invalid.
inline bool breaks_capture() {
    if (capturing) capturing->invalid = true;
    return capturing;
}

inline bool is_pinned(const void *at, size_t size) {
    const char *begin = static_cast<const char *>(at);
    auto after = pinned.upper_bound(begin);
    if (after == pinned.begin()) return false;
    --after;
    return begin + size <= after->first + after->second;
}

inline void record(warpbus_event *event, warpbus_stream *stream) {
    event->stream = stream;
    event->graph = stream ? stream->graph : nullptr;
    if (event->graph) {
        event->position = stream->captured;
        return;
    }
    const uint64_t version = ++event->recorded;
    enqueue(stream, [event, version] {
        event->at = std::chrono::steady_clock::now();
        event->done = std::max(event->done, version);
    });
}

inline void wait_for_event(warpbus_stream *stream, warpbus_event *event) {
    if (event->graph && event->graph == capturing && stream) {
        stream->graph = event->graph;  // the stream is captured too from now on
        if (stream == event->graph->origin) event->stream->joined = std::max(event->stream->joined, event->position);
        return;
    }
    const uint64_t version = event->recorded;
    warpbus_stream *of = event->stream;
    if (!version || !of) return;
    enqueue(stream, [=] {
        while (event->done < version && step(of)) {}
    });
}

}  // namespace warpbus
