// Selects the table of kernels for an instruction set. avx512bf16 has no kernels of its own and uses those of avx512.
#include "kernels.h"

namespace regard {

extern const Kernels kernels_portable;
#ifdef REGARD_X86_KERNELS
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

const Kernels& kernels_for([[maybe_unused]] InstructionSet set) {
#ifdef REGARD_X86_KERNELS
    if (set >= InstructionSet::avx512) return kernels_avx512;
    if (set == InstructionSet::avx2) return kernels_avx2;
#endif
    return kernels_portable;
}

}  // namespace regard
