// The kernels for the instruction set neonbf16.
#define REGARD_NEON
#define REGARD_NEON_BF16
#define REGARD_ISA_NAMESPACE neonbf16
#define REGARD_KERNELS kernels_neonbf16
#include "define_kernels.h"
