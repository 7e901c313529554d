// The kernels for avx2: this file is compiled with its flags (CMakeLists.txt).
#define REGARD_ISA_NAMESPACE avx2
#include "backward.h"
#include "kernels.h"
#include "look.h"
#include "step.h"

namespace regard {
extern const Kernels k_avx2;
const Kernels k_avx2 = {avx2::forward, avx2::backward, avx2::look, avx2::linear, avx2::norm, avx2::turn, avx2::step};
}  // namespace regard
