// Runs tasks 0 … count − 1 on OpenMP threads: the runtime torch brings, so that its waiting threads are ours too.
#pragma once

#include <cstdint>

namespace regard {

// Whether threads may be used here: not in a child of fork(), where the runtime's threads do not exist.
bool may_use_threads();

// Each thread makes a State of its own, then runs work(task, state) on what it is given, in order of the tasks.
template <class State, class Make, class Work>
void run_tasks(int64_t count, int threads, const Make& make, const Work& work) {
    if (threads > count) threads = static_cast<int>(count);
    if (threads <= 1 || !may_use_threads()) {
        State state = make();
        for (int64_t t = 0; t < count; t++) work(t, state);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        State state = make();
#pragma omp for schedule(dynamic, 1)
        for (int64_t t = 0; t < count; t++) work(t, state);
    }
}

}  // namespace regard
