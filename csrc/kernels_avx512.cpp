// The kernels for the instruction set avx512.
#define REGARD_ISA_NAMESPACE avx512
#define REGARD_KERNELS kernels_avx512
#include "define_kernels.h"
