// The kernels of one instruction set as a table of functions. The same sources are compiled for each set.
#pragma once

#include "attention_call.h"
#include "decode_call.h"
#include "instruction_sets.h"

namespace regard {

struct Kernels {
    bool (*forward)(const AttentionCall&);                       // false: a result is not finite
    bool (*backward)(const AttentionCall&, const Gradients&);    // false: a gradient is not finite
    void (*second_pass)(const AttentionCall&, const SecondPass&);
    void (*linear)(const LinearCall&);
    void (*norm)(const NormCall&);
    void (*rope)(const RopeCall&);
    bool (*decode_block)(const DecodeBlock&, const DecodeCall&);  // false: the attention is not finite
};

// The best kernels that need no more than this instruction set.
const Kernels& kernels_for(InstructionSet set);

}  // namespace regard
