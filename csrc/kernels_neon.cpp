// The kernels for the instruction set neon.
#define REGARD_NEON
#define REGARD_ISA_NAMESPACE neon
#define REGARD_KERNELS kernels_neon
#include "define_kernels.h"
