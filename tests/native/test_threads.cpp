// Runs tasks on the threads of macOS (REGARD_USE_DISPATCH), with a stand-in for the system's function: every task runs
// once, and an exception reaches the caller.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "threads.h"

using namespace regard;

namespace {

int passed = 0;
int failed = 0;

void check(bool fine, const char* what, int64_t count, int threads) {
    (fine ? passed : failed)++;
    if (!fine) std::printf("%s: false for %lld tasks on %d threads\n", what, static_cast<long long>(count), threads);
}

struct State {
    int64_t last_task = -1;
};

// Every task runs once, and each thread takes its tasks in ascending order.
void check_tasks(int64_t count, int threads) {
    std::vector<std::atomic<int>> runs(count);
    std::atomic<bool> ascending{true};
    run_tasks<State>(
        count, threads, [] { return State(); },
        [&](int64_t task, State& state) {
            if (task <= state.last_task) ascending = false;
            state.last_task = task;
            runs[task]++;
        });
    bool once = true;
    for (const std::atomic<int>& run : runs) once = once && run == 1;
    check(once, "every task runs once", count, threads);
    check(ascending, "tasks are taken in ascending order", count, threads);
}

// The message of the exception that run_tasks throws; empty if there is none.
template <class MakeState, class Work>
std::string message_of(int64_t count, int threads, const MakeState& make_state, const Work& work) {
    try {
        run_tasks<State>(count, threads, make_state, work);
    } catch (const std::runtime_error& error) {
        return error.what();
    }
    return "";
}

void check_exceptions(int64_t count, int threads) {
    const auto make_state = [] { return State(); };
    const auto fail_to_make = []() -> State { throw std::runtime_error("state"); };
    const auto work = [](int64_t, State&) {};
    const auto fail_at_last = [&](int64_t task, State&) {
        if (task == count - 1) throw std::runtime_error("task");
    };
    check(message_of(count, threads, fail_to_make, work) == "state", "a State's exception arrives", count, threads);
    check(message_of(count, threads, make_state, fail_at_last) == "task", "a task's exception arrives", count, threads);
}

}  // namespace

int main() {
    may_use_threads();  // marks this process as the parent
    for (int threads : {1, 2, 5}) {
        check_tasks(0, threads);
        for (int64_t count : {1, 2, 7, 1009}) {
            check_tasks(count, threads);
            check_exceptions(count, threads);
        }
    }
    std::printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
