// Runs tasks on OpenMP threads. The OpenMP runtime is the one that torch loads, so both share its threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>

namespace regard {

// Whether threads may be used: not in a child of fork(), where the runtime's threads do not exist. The first call marks
// this process as the parent.
bool may_use_threads();

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
    std::exception_ptr failure;
#pragma omp parallel num_threads(threads)
    {
        try {
            State state = make_state();
            for (int64_t task = next_task++; task < count; task = next_task++) work(task, state);
        } catch (...) {
            next_task = count;
#pragma omp critical(regard_failure)
            failure = std::current_exception();
        }
    }
    if (failure) std::rethrow_exception(failure);
}

}  // namespace regard
