// Which instruction sets this processor and its operating system support, and which one the kernels use.
#pragma once

#include <vector>

namespace regard {

// Ordered: each set of a family of processors contains all sets before it.
enum class InstructionSet {
    portable,    // plain C++, on every machine
    emulated,    // the code of avx512bf16 on AVX2, for tests; only in builds with REGARD_EMULATION
    avx2,        // AVX2, FMA and F16C
    avx512,      // and AVX-512 F, BW, DQ, VL
    avx512bf16,  // and AVX-512 BF16
    neon,        // NEON, which every 64-bit ARM processor has
    neonbf16,    // and products of bfloat16 pairs (FEAT_BF16)
};

// The name that Python and REGARD_ISA use.
const char* name_of(InstructionSet set);

// What this machine can run, weakest first, best last; never empty.
const std::vector<InstructionSet>& supported_instruction_sets();

// The best supported set, or the one that the environment variable REGARD_ISA names. The variable is read at the first
// call and the answer is kept, so that all kernels of a process use one set. Throws std::invalid_argument for a name
// that is unknown or that this machine cannot run.
InstructionSet chosen_instruction_set();

}  // namespace regard
