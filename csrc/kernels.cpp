// Selects the table of kernels for an instruction set.
#include "kernels.h"

namespace regard {

extern const Kernels kernels_portable;
#ifdef REGARD_X86_KERNELS
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
extern const Kernels kernels_avx512bf16;
#endif
#ifdef REGARD_ARM_KERNELS
extern const Kernels kernels_neon;
extern const Kernels kernels_neonbf16;
#endif
#ifdef REGARD_EMULATION
extern const Kernels kernels_emulated;
#endif

const Kernels& kernels_for(InstructionSet set) {
    switch (set) {
#ifdef REGARD_X86_KERNELS
        case InstructionSet::avx512bf16: return kernels_avx512bf16;
        case InstructionSet::avx512: return kernels_avx512;
        case InstructionSet::avx2: return kernels_avx2;
#endif
#ifdef REGARD_ARM_KERNELS
        case InstructionSet::neonbf16: return kernels_neonbf16;
        case InstructionSet::neon: return kernels_neon;
#endif
#ifdef REGARD_EMULATION
        case InstructionSet::emulated: return kernels_emulated;
#endif
        default: return kernels_portable;
    }
}

}  // namespace regard
