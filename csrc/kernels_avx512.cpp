// The kernels for avx512: this file is compiled with its flags (CMakeLists.txt).
#define REGARD_ISA_NAMESPACE avx512
#include "backward.h"
#include "kernels.h"
#include "look.h"
#include "step.h"

namespace regard {
extern const Kernels k_avx512;
const Kernels k_avx512 = {avx512::forward, avx512::backward, avx512::look, avx512::linear, avx512::norm, avx512::turn, avx512::step};
}  // namespace regard
