// Detects a child process of fork(), in which threads must not be used.
#include "threads.h"

#include <unistd.h>

namespace regard {

bool may_use_threads() {
    static const pid_t parent = getpid();  // bindings.cpp calls this function when the module is loaded
    return getpid() == parent;
}

}  // namespace regard
