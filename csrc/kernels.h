// The same kernels, compiled for each instruction set; bindings.cpp takes those that fit the machine.
#pragma once

#include "call.h"
#include "cpu.h"

namespace regard {

struct Kernels {
    bool (*forward)(const Call&);                      // false: a result is not finite
    bool (*backward)(const Call&, const Gradients&);   // false: a gradient is not finite
    void (*look)(const Call&, const Look&);
    void (*linear)(const Linear&);
    void (*norm)(const Norm&);
    void (*turn)(const Turn&);
    bool (*step)(const Step&);  // false: a weighted sum is not finite
};

const Kernels& kernels_for(InstructionSet set);

}  // namespace regard
