// Reads torch tensors through their Python attributes, and checks them.
#include "tensor_arguments.h"

#include <cstdint>
#include <stdexcept>

namespace regard {
namespace {

// Python names and objects that are looked up once. They live as long as the process.
struct TorchObjects {
    nb::object tensor_type;
    nb::object float32;
    nb::object bfloat16;
    nb::object float16;
    nb::object float64;
    nb::object int64;
    nb::object boolean;
    PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
    PyObject* dtype = PyUnicode_InternFromString("dtype");
    PyObject* is_cpu = PyUnicode_InternFromString("is_cpu");
    PyObject* shape = PyUnicode_InternFromString("shape");
    PyObject* stride = PyUnicode_InternFromString("stride");

    TorchObjects() {
        const nb::module_ torch = nb::module_::import_("torch");
        tensor_type = torch.attr("Tensor");
        float32 = torch.attr("float32");
        bfloat16 = torch.attr("bfloat16");
        float16 = torch.attr("float16");
        float64 = torch.attr("float64");
        int64 = torch.attr("int64");
        boolean = torch.attr("bool");
    }
};

// Torch is imported by the first call with a tensor, not when the module is loaded: `regard --version` needs no torch.
const TorchObjects& torch_objects() {
    static const TorchObjects* objects = new TorchObjects();
    return *objects;
}

nb::object attribute(nb::handle object, PyObject* name) {
    PyObject* value = PyObject_GetAttr(object.ptr(), name);
    if (!value) nb::raise_python_error();
    return nb::steal(value);
}

nb::object call_method(nb::handle object, PyObject* name) {
    PyObject* arguments[] = {object.ptr()};
    PyObject* value = PyObject_VectorcallMethod(name, arguments, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
    if (!value) nb::raise_python_error();
    return nb::steal(value);
}

int64_t tuple_item(const nb::object& tuple, Py_ssize_t index) {
    PyObject* item = PyTuple_GetItem(tuple.ptr(), index);
    if (!item) nb::raise_python_error();
    const int64_t value = PyLong_AsLongLong(item);
    if (value == -1 && PyErr_Occurred()) nb::raise_python_error();
    return value;
}

ElementType element_type(const nb::object& dtype) {
    const TorchObjects& torch = torch_objects();
    if (dtype.is(torch.float32)) return ElementType::float32;
    if (dtype.is(torch.bfloat16)) return ElementType::bfloat16;
    if (dtype.is(torch.float16)) return ElementType::float16;
    if (dtype.is(torch.float64)) return ElementType::float64;
    if (dtype.is(torch.int64)) return ElementType::int64;
    if (dtype.is(torch.boolean)) return ElementType::boolean;
    return ElementType::other;
}

size_t element_size(ElementType type) {
    switch (type) {
        case ElementType::float64:
        case ElementType::int64: return 8;
        case ElementType::float32: return 4;
        case ElementType::bfloat16:
        case ElementType::float16: return 2;
        default: return 1;  // of another dtype no element is read
    }
}

const char* name_of(ElementType type) {
    switch (type) {
        case ElementType::float32: return "torch.float32";
        case ElementType::bfloat16: return "torch.bfloat16";
        case ElementType::float16: return "torch.float16";
        case ElementType::float64: return "torch.float64";
        case ElementType::int64: return "torch.int64";
        case ElementType::boolean: return "torch.bool";
        default: return "another dtype";
    }
}

std::string text_of(nb::handle object) { return nb::str(object).c_str(); }

std::string list_text(const int64_t* values, int count) {
    std::string text = "[";
    for (int t = 0; t < count; t++) {
        if (t > 0) text += ", ";
        text += values[t] == kAnySize ? "any" : std::to_string(values[t]);
    }
    return text + "]";
}

}  // namespace

int64_t checked_product(const char* name, int64_t a, int64_t b) {
    int64_t product = 0;
    if (__builtin_mul_overflow(a, b, &product))
        throw std::invalid_argument(std::string(name) + " must have sizes whose product fits into 64 bits, got " +
                                    std::to_string(a) + " and " + std::to_string(b));
    return product;
}

void* data_pointer(nb::handle tensor) {
    const nb::object address = call_method(tensor, torch_objects().data_ptr);
    void* data = PyLong_AsVoidPtr(address.ptr());
    if (!data && PyErr_Occurred()) nb::raise_python_error();
    return data;
}

TorchTensor::TorchTensor(const char* name, TensorArgument argument) : name_(name), object_(argument.object) {
    const TorchObjects& torch = torch_objects();
    auto* tensor_type = reinterpret_cast<PyTypeObject*>(torch.tensor_type.ptr());
    if (!object_.is_valid() || !PyObject_TypeCheck(object_.ptr(), tensor_type)) {
        const std::string given = object_.is_valid() ? text_of(object_.type().attr("__name__")) : "nothing";
        throw nb::type_error((std::string(name_) + " must be a torch.Tensor, got " + given).c_str());
    }
    if (attribute(object_, torch.is_cpu).ptr() != Py_True)
        fail("be on the CPU, got " + text_of(object_.attr("device")));

    type_ = element_type(attribute(object_, torch.dtype));
    const nb::object shape = attribute(object_, torch.shape);
    const nb::object strides = call_method(object_, torch.stride);
    dimensions_ = static_cast<int>(PyTuple_Size(shape.ptr()));
    if (dimensions_ < 0) nb::raise_python_error();
    if (dimensions_ > 4) fail("have at most 4 dimensions, got " + std::to_string(dimensions_));
    for (int t = 0; t < dimensions_; t++) {
        sizes_[t] = tuple_item(shape, t);
        strides_[t] = tuple_item(strides, t);
        empty_ |= sizes_[t] == 0;
    }

    data_ = data_pointer(object_);
    if (!data_ && !empty_) fail("be a tensor with memory, got one without");
    // C++ does not define what reading a number from another address does.
    if (reinterpret_cast<uintptr_t>(data_) % element_size(type_) != 0)
        fail("have its elements at multiples of their size in memory, got address " +
             std::to_string(reinterpret_cast<uintptr_t>(data_)) + "; a clone of it has");
}

void TorchTensor::fail(const std::string& rule) const {
    throw std::invalid_argument(std::string(name_) + " must " + rule);
}

std::string TorchTensor::shape_text() const { return list_text(sizes_, dimensions_); }

Dtype TorchTensor::float_dtype() const {
    switch (type_) {
        case ElementType::float32: return Dtype::float32;
        case ElementType::bfloat16: return Dtype::bfloat16;
        case ElementType::float16: return Dtype::float16;
        default: fail("be torch.float32, torch.bfloat16 or torch.float16, got " + text_of(object_.attr("dtype")));
    }
}

void TorchTensor::require_type(ElementType type) const {
    if (type_ != type) fail(std::string("be ") + name_of(type) + ", got " + text_of(object_.attr("dtype")));
}

void TorchTensor::require_float_dtype(Dtype dtype) const {
    switch (dtype) {
        case Dtype::float32: return require_type(ElementType::float32);
        case Dtype::bfloat16: return require_type(ElementType::bfloat16);
        case Dtype::float16: return require_type(ElementType::float16);
    }
}

void TorchTensor::require_dimensions(int dimensions) const {
    if (dimensions_ != dimensions)
        fail("have " + std::to_string(dimensions) + " dimensions, got shape " + shape_text());
}

void TorchTensor::require_sizes(std::initializer_list<int64_t> shape, bool broadcast) const {
    const int64_t* expected = shape.begin();
    bool fits = dimensions_ == static_cast<int>(shape.size());
    for (int t = 0; fits && t < dimensions_; t++)
        fits = sizes_[t] == expected[t] || expected[t] == kAnySize || (broadcast && sizes_[t] == 1);
    if (fits) return;
    const std::string rule = broadcast ? "be broadcastable to shape " : "have shape ";
    fail(rule + list_text(expected, static_cast<int>(shape.size())) + ", got " + shape_text());
}

void TorchTensor::require_shape(std::initializer_list<int64_t> shape) const { require_sizes(shape, false); }

void TorchTensor::require_broadcastable(std::initializer_list<int64_t> shape) const { require_sizes(shape, true); }

void TorchTensor::require_contiguous() const {
    if (empty_) return;
    int64_t expected = 1;
    for (int t = dimensions_ - 1; t >= 0; t--) {
        if (sizes_[t] != 1 && strides_[t] != expected)
            fail("be contiguous, got strides " + list_text(strides_, dimensions_) + " for shape " + shape_text());
        expected *= sizes_[t];
    }
}

void TorchTensor::require_contiguous_rows() const {
    const int last = dimensions_ - 1;
    if (!empty_ && last >= 0 && sizes_[last] > 1 && strides_[last] != 1)
        fail("be contiguous in its last dimension, got strides " + list_text(strides_, dimensions_));
}

void TorchTensor::require_own_elements() const {
    for (int t = 0; t < dimensions_ && !empty_; t++)
        if (sizes_[t] > 1 && strides_[t] == 0)
            fail("have its own memory for every element, got strides " + list_text(strides_, dimensions_) +
                 " for shape " + shape_text());
}

TensorView TorchTensor::view() const {
    require_dimensions(4);
    const auto broadcast_stride = [&](int t) { return sizes_[t] == 1 ? 0 : strides_[t]; };
    return {data_, broadcast_stride(0), broadcast_stride(1), broadcast_stride(2), broadcast_stride(3)};
}

namespace {

void* checked_data(const char* name, TensorArgument argument, ElementType type, std::initializer_list<int64_t> shape) {
    const TorchTensor tensor(name, argument);
    tensor.require_type(type);
    tensor.require_shape(shape);
    tensor.require_contiguous();
    return tensor.data();
}

}  // namespace

template <>
float* contiguous_data(const char* name, TensorArgument argument, std::initializer_list<int64_t> shape) {
    return static_cast<float*>(checked_data(name, argument, ElementType::float32, shape));
}

template <>
double* contiguous_data(const char* name, TensorArgument argument, std::initializer_list<int64_t> shape) {
    return static_cast<double*>(checked_data(name, argument, ElementType::float64, shape));
}

template <>
int64_t* contiguous_data(const char* name, TensorArgument argument, std::initializer_list<int64_t> shape) {
    return static_cast<int64_t*>(checked_data(name, argument, ElementType::int64, shape));
}

template <>
uint8_t* contiguous_data(const char* name, TensorArgument argument, std::initializer_list<int64_t> shape) {
    return static_cast<uint8_t*>(checked_data(name, argument, ElementType::boolean, shape));
}

const Kernels& kernels_named(const char* instruction_set) {
    const std::string requested = instruction_set;
    std::string supported;
    for (InstructionSet set : supported_instruction_sets()) {
        if (requested == regard::name_of(set)) return kernels_for(set);
        if (!supported.empty()) supported += ", ";
        supported += regard::name_of(set);
    }
    throw std::invalid_argument("instruction_set must be one of " + supported + " on this machine, got " + requested);
}

}  // namespace regard
