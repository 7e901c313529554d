// Runs tasks on several threads. With OpenMP, the runtime is the one that torch loads, so both share its threads. On macOS,
// where torch's runtime cannot be shared by name, the threads are those of the system (Grand Central Dispatch).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>

#if defined(REGARD_USE_DISPATCH)
#include <dispatch/dispatch.h>
#endif

namespace regard {

// Whether threads may be used: not in a child of fork(), where the runtime's threads do not exist. The first call marks
// this process as the parent.
bool may_use_threads();

// The number of threads for a call of `work` multiply–adds. Each thread gets at least MIN_WORK_PER_THREAD: on a machine
// with free cores a second thread pays for less, but where all cores are busy, a small call that waits for its second
// thread takes a time slice of the system, hundreds of times longer than the call (scripts/measure/small_calls.py).
#ifndef REGARD_MIN_WORK_PER_THREAD
#define REGARD_MIN_WORK_PER_THREAD (1 << 21)
#endif
constexpr double MIN_WORK_PER_THREAD = REGARD_MIN_WORK_PER_THREAD;
// A number that is read from memory counts as this many multiply–adds: with few rows, reading takes longest.
constexpr double READ_COST = 8;

static inline int limit_threads(int threads, double work) {
    const double useful = work / MIN_WORK_PER_THREAD;
    if (useful >= threads) return threads;
    return useful < 2 ? 1 : static_cast<int>(useful);
}

// The exception of a thread. Its functions are not inline: those of std::exception_ptr would be compiled for every
// instruction set under one name (see array.h).
class TaskFailure {
public:
    TaskFailure();
    ~TaskFailure();
    TaskFailure(const TaskFailure&) = delete;
    TaskFailure& operator=(const TaskFailure&) = delete;

    void keep_current();   // keeps the exception that is being handled; several threads may call it
    void rethrow() const;  // throws the exception that was kept, if there is one

private:
    std::atomic<bool> kept_{false};
    std::exception_ptr failure_;
};

// Calls body() `threads` times, in parallel where the system has threads to spare.
template <class Body>
void run_on_threads(int threads, const Body& body) {
#if defined(REGARD_USE_DISPATCH)
    const auto call = [](void* context, size_t) { (*static_cast<const Body*>(context))(); };
    dispatch_apply_f(static_cast<size_t>(threads), DISPATCH_APPLY_AUTO, const_cast<Body*>(&body), call);
#else
#pragma omp parallel num_threads(threads)
    body();
#endif
}

// Runs work(task, state) for tasks 0 … count − 1. Each thread creates one State, and takes tasks in ascending order. An
// exception (a State that does not fit into memory) ends all threads and is thrown to the caller: one that leaves a
// parallel region would end the process.
template <class State, class MakeState, class Work>
void run_tasks(int64_t count, int threads, const MakeState& make_state, const Work& work) {
    if (threads > count) threads = static_cast<int>(count);
    if (threads <= 1 || !may_use_threads()) {
        State state = make_state();
        for (int64_t task = 0; task < count; task++) work(task, state);
        return;
    }
    std::atomic<int64_t> next_task{0};
    TaskFailure failure;
    run_on_threads(threads, [&] {
        if (next_task >= count) return;  // a thread that comes late needs no State
        try {
            State state = make_state();
            for (int64_t task = next_task++; task < count; task = next_task++) work(task, state);
        } catch (...) {
            next_task = count;
            failure.keep_current();
        }
    });
    failure.rethrow();
}

}  // namespace regard
