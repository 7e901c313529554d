// The kernels for the instruction set avx512bf16.
#define REGARD_ISA_NAMESPACE avx512bf16
#define REGARD_KERNELS kernels_avx512bf16
#include "define_kernels.h"
