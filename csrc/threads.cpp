#include "threads.h"

#include <unistd.h>

namespace regard {

bool may_use_threads() {
    static const pid_t home = getpid();  // set when the module is loaded, see bindings.cpp
    return getpid() == home;
}

}  // namespace regard
