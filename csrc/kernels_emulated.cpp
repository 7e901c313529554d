// The kernels of avx512bf16, compiled for AVX2 with an emulation of the products of pairs (bf16_pairs.h), for tests.
#define REGARD_EMULATE_AVX512BF16
#define REGARD_ISA_NAMESPACE emulated
#define REGARD_KERNELS kernels_emulated
#include "define_kernels.h"
