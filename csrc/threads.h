// Runs tasks on OpenMP threads. The OpenMP runtime is the one that torch loads, so both share its threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>

namespace regard {

// Whether threads may be used: not in a child of fork(), where the runtime's threads do not exist. The first call marks
// this process as the parent.
bool may_use_threads();

// The number of threads for a call of `work` multiply–adds. Each thread gets at least MIN_WORK_PER_THREAD: waking a
// thread takes longer than a small call, above all on a busy machine.
constexpr double MIN_WORK_PER_THREAD = 1 << 19;

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

    void keep_current();     // keeps the exception that is being handled
    void rethrow() const;    // throws the exception that was kept, if there is one

private:
    std::exception_ptr failure_;
};

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
#pragma omp parallel num_threads(threads)
    {
        try {
            State state = make_state();
            for (int64_t task = next_task++; task < count; task = next_task++) work(task, state);
        } catch (...) {
            next_task = count;
#pragma omp critical(regard_failure)
            failure.keep_current();
        }
    }
    failure.rethrow();
}

}  // namespace regard
