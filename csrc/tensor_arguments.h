// Torch tensors as arguments of the native module: checked for type, device, dtype and shape before a kernel sees them.
//
// A tensor is read through its own methods (data_ptr, dtype, shape, stride, is_cpu). The four tensors of the smallest
// attention call take 2 µs this way; as nanobind::ndarray, which goes through __dlpack__, they take 11 µs, a third of
// the whole call. Torch guarantees that every element of a tensor's shape lies in its storage, that no stride is
// negative, and that the number of elements fits into 64 bits. The shapes of all tensors of a call are compared with
// each other, so a kernel that stays inside them cannot read or write outside a buffer.
#pragma once

#include <nanobind/nanobind.h>

#include <initializer_list>
#include <string>
#include <vector>

#include "attention_call.h"
#include "kernels.h"

namespace regard {

namespace nb = nanobind;

// A Python object where a torch tensor is expected. TorchTensor reads and checks it; its errors name the argument, in
// one line.
struct TensorArgument {
    nb::handle object;

    bool given() const { return object.is_valid() && !object.is_none(); }
};

enum class ElementType { float32, bfloat16, float16, float64, int64, boolean, other };

constexpr int64_t kAnySize = -1;

// A tensor that was read from Python: on the CPU, with at most four dimensions. Checks throw std::invalid_argument
// (ValueError in Python), or nb::type_error if the object is not a tensor.
class TorchTensor {
public:
    TorchTensor(const char* name, TensorArgument argument);

    ElementType type() const { return type_; }
    int dimensions() const { return dimensions_; }
    int64_t size(int dimension) const { return sizes_[dimension]; }
    int64_t stride(int dimension) const { return strides_[dimension]; }
    void* data() const { return data_; }

    // The dtype of the elements, which must be one that the kernels read.
    Dtype float_dtype() const;

    void require_type(ElementType type) const;
    void require_float_dtype(Dtype dtype) const;
    void require_dimensions(int dimensions) const;
    // kAnySize accepts any size.
    void require_shape(std::initializer_list<int64_t> shape) const;
    // A size of 1 is accepted everywhere: it is broadcast.
    void require_broadcastable(std::initializer_list<int64_t> shape) const;
    void require_contiguous() const;
    // Only the last dimension must be contiguous.
    void require_contiguous_rows() const;
    // For a tensor that a kernel writes: no element is another one too, as in an expanded tensor.
    void require_own_elements() const;
    // Throws "<name> must <rule>".
    [[noreturn]] void fail(const std::string& rule) const;

    // The view of a tensor of four dimensions. A dimension of size 1 has stride 0 in it.
    TensorView view() const;

private:
    std::string shape_text() const;
    void require_sizes(std::initializer_list<int64_t> shape, bool broadcast) const;

    const char* name_;
    nb::handle object_;
    void* data_ = nullptr;
    ElementType type_ = ElementType::other;
    int dimensions_ = 0;
    bool empty_ = false;  // without elements: data may be null, and strides have no meaning
    int64_t sizes_[4] = {1, 1, 1, 1};
    int64_t strides_[4] = {0, 0, 0, 0};
};

// Checks that the argument is a contiguous tensor of this shape with elements T, and returns a pointer to its elements.
template <class T>
T* contiguous_data(const char* name, TensorArgument argument, std::initializer_list<int64_t> shape);

template <>
float* contiguous_data(const char* name, TensorArgument argument, std::initializer_list<int64_t> shape);
template <>
double* contiguous_data(const char* name, TensorArgument argument, std::initializer_list<int64_t> shape);
template <>
int64_t* contiguous_data(const char* name, TensorArgument argument, std::initializer_list<int64_t> shape);
template <>
uint8_t* contiguous_data(const char* name, TensorArgument argument, std::initializer_list<int64_t> shape);

// a · b of two sizes. Throws std::invalid_argument, which names the argument, if the product does not fit.
int64_t checked_product(const char* name, int64_t a, int64_t b);

// The address of a tensor's first element, without any check.
void* data_pointer(nb::handle tensor);

// The kernels of a named instruction set. Throws std::invalid_argument if this machine cannot run it.
const Kernels& kernels_named(const char* instruction_set);

void bind_attention(nb::module_& module);
void bind_decode(nb::module_& module);

}  // namespace regard

namespace nanobind {
namespace detail {

// Accepts every object: TorchTensor raises the error if it is not a tensor, in one line.
template <>
struct type_caster<regard::TensorArgument> {
    NB_TYPE_CASTER(regard::TensorArgument, const_name("torch.Tensor"))

    bool from_python(handle source, uint8_t, cleanup_list*) noexcept {
        value.object = source;
        return true;
    }
};

}  // namespace detail
}  // namespace nanobind
