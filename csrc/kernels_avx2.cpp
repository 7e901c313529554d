// The kernels for the instruction set avx2.
#define REGARD_ISA_NAMESPACE avx2
#define REGARD_KERNELS kernels_avx2
#include "define_kernels.h"
