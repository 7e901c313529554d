// An array on the heap, for the kernels. They must not use std::vector: its functions would be compiled for every
// instruction set under one name, the linker would keep any one of them, and an old processor could run code that was
// compiled for a newer one. A class in the namespace of the instruction set has names of its own.
#pragma once

#include <cstdint>

namespace regard {
namespace REGARD_ISA_NAMESPACE {

// `size` elements, all zero at first.
template <class T>
class Array {
public:
    explicit Array(int64_t size) : data_(new T[size]()), size_(size) {}
    ~Array() { delete[] data_; }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;

    T* data() { return data_; }
    T& operator[](int64_t index) { return data_[index]; }
    int64_t size() const { return size_; }
    T* begin() { return data_; }
    T* end() { return data_ + size_; }

private:
    T* data_;
    int64_t size_;
};

}  // namespace REGARD_ISA_NAMESPACE
}  // namespace regard
