// The kernels for the instruction set portable.
#define REGARD_ISA_NAMESPACE portable
#define REGARD_KERNELS kernels_portable
#include "define_kernels.h"
