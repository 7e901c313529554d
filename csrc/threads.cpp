// Detects a child process of fork(), in which threads must not be used, and keeps the exception of a thread.
#include "threads.h"

#include <unistd.h>

namespace regard {

bool may_use_threads() {
    static const pid_t parent = getpid();  // bindings.cpp calls this function when the module is loaded
    return getpid() == parent;
}

TaskFailure::TaskFailure() = default;
TaskFailure::~TaskFailure() = default;

void TaskFailure::keep_current() {
    if (!kept_.exchange(true)) failure_ = std::current_exception();
}

void TaskFailure::rethrow() const {
    if (failure_) std::rethrow_exception(failure_);
}

}  // namespace regard
