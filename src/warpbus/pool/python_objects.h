// Python's objects in C++: references that release themselves, and errors as exceptions. All of it needs the GIL.

#pragma once

#include <torch/csrc/Exceptions.h>

#include <cstdint>
#include <utility>

namespace warpbus {

// An owned reference.
class Object {
 public:
  Object() = default;
  explicit Object(PyObject* object) : object_(object) {}
  Object(Object&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Object& operator=(Object&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Object() { Py_XDECREF(object_); }
  static Object borrowed(PyObject* object) {
    Py_XINCREF(object);
    return Object(object);
  }
  PyObject* get() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// Throws the error of Python that has just occurred.
[[noreturn]] inline void raise() {
  python_error error;
  error.persist();
  throw error;
}

inline Object checked(PyObject* object) {
  if (object == nullptr) raise();
  return Object(object);
}

inline Object attribute(PyObject* object, PyObject* name) { return checked(PyObject_GetAttr(object, name)); }

inline int64_t integer(PyObject* object) {
  const long long value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) raise();
  return value;
}

}  // namespace warpbus
