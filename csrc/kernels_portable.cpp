// The kernels for portable: this file is compiled with its flags (CMakeLists.txt).
#define REGARD_ISA_NAMESPACE portable
#include "backward.h"
#include "kernels.h"
#include "look.h"
#include "step.h"

namespace regard {
extern const Kernels k_portable;
const Kernels k_portable = {portable::forward, portable::backward, portable::look, portable::linear, portable::norm, portable::turn, portable::step};
}  // namespace regard
