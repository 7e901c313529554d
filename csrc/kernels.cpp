#include "kernels.h"

namespace regard {

extern const Kernels k_portable;
#ifdef REGARD_X86_KERNELS
extern const Kernels k_avx2, k_avx512;
#endif

const Kernels& kernels_for(InstructionSet set) {
#ifdef REGARD_X86_KERNELS
    if (set >= InstructionSet::avx512) return k_avx512;
    if (set == InstructionSet::avx2) return k_avx2;
#endif
    (void)set;
    return k_portable;
}

}  // namespace regard
