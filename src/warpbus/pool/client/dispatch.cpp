// The hot path of the client in C++: what `dispatch.Operator` does for a kind of call that it has met before, without
// Python's loops and conversions.
//
// Each operator of the device has two kernels: the one of this file under the dispatch key PrivateUse1, and that of
// Python under PrivateUse2. The first call of a kind goes to Python, which defines it at the tenant and leaves a plan
// (`_PreparedCall.plan`). Later calls with the same key are encoded here. Everything that this file does not know -
// several devices, marked tensors, tensors of the CPU, generators, a full quota - goes to Python.
//
// A key is everything about the arguments except handles and numbers, as bytes. Equal keys have equal keys in Python.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Storage.h>
#include <torch/library.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "python_objects.h"

namespace {

using warpbus::attribute, warpbus::checked, warpbus::integer, warpbus::Object, warpbus::raise;

constexpr auto kDevice = c10::DispatchKey::PrivateUse1;
constexpr auto kPython = c10::DispatchKey::PrivateUse2;

// A session, and one numbering of its definitions: plans hold for one target alone.
struct Target {
  uint64_t number;  // no other target of this process has it
  int64_t memory;
  Object session, acquire, release, call, freed, remote;
};

// That of the next call, or none; guarded by the GIL. A call keeps the one that it began with, whatever other threads
// connect meanwhile. Never destroyed: calls may come while Python shuts down.
auto& current = *new std::shared_ptr<const Target>();
std::atomic<bool> active = false;  // there is one; to be asked without the GIL
uint64_t targets = 0;              // made in this process
PyObject *name_remote, *name_handle, *name_used, *name_peak, *name_kind, *name_plan;

// The session's lock, which is reentrant.
class Lock {
 public:
  explicit Lock(const Target& target) : release_(target.release.get()) {
    checked(PyObject_CallNoArgs(target.acquire.get()));
  }
  ~Lock() {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    Object(PyObject_CallNoArgs(release_));
    PyErr_Restore(type, value, traceback);
  }

 private:
  PyObject* release_;
};

struct Output {
  enum Kind { New = 0, Same = 1, Absent = 2, Fixed = 3 };
  int64_t kind = Absent;
  int64_t value = 0;  // bytes of a new storage, index of an input, or a fixed number
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<int64_t> shape, stride;
  bool contiguous = true;
  Object nbytes;  // as an int of Python
};

struct Plan {
  bool usable = false;
  int64_t allocated = 0;  // bytes of all new storages
  std::string prefix;     // of the encoded call
  std::vector<Output> outputs;
};

// One call, taken apart.
struct Call {
  std::string key;
  std::vector<const at::Tensor*> tensors;
  std::vector<uint64_t> numbers;
  std::string kinds;  // of the numbers

  template <typename T>
  void add(const T& value) {
    key.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  template <typename T>
  void push(char kind, const T& value) {
    static_assert(sizeof value == 8);
    uint64_t bits;
    std::memcpy(&bits, &value, 8);
    numbers.push_back(bits);
    kinds.push_back(kind);
  }
};

void push_number(Call& call, char kind, int64_t value) { call.push(kind, value); }

class Kernel final : public c10::OperatorKernel {
 public:
  Kernel(PyObject* function, std::vector<bool> is_number)
      : function_(function), is_number_(std::move(is_number)) {
    Py_INCREF(function_);  // for as long as the process lives, as the registration does
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    if (!active || !known(op, stack)) op.redispatchBoxed(c10::DispatchKeySet(kPython), stack);
  }

 private:
  // Whether the call has been done. Otherwise nothing has happened.
  bool known(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const auto& schema = op.schema();
    const auto arguments = torch::jit::last(*stack, schema.arguments().size());
    Call call;
    call.key.reserve(256);
    for (size_t index = 0; index < arguments.size(); ++index) {
      if (!take(call, arguments[index], is_number_[index], schema, arguments, index)) return false;
    }
    pybind11::gil_scoped_acquire gil;
    const auto target = current;
    if (target == nullptr) return false;
    const Lock lock(*target);
    if (target != current) return false;  // another thread has connected or disconnected
    std::vector<uint64_t> operands;
    operands.reserve(call.tensors.size() + call.numbers.size() + 4);
    for (const auto* tensor : call.tensors) {
      uint64_t handle;
      if (!handle_of(*tensor, handle)) return false;
      operands.push_back(handle);
    }
    if (planned_for_ != target->number) {
      plans_->clear();
      planned_for_ = target->number;
    }
    const auto found = plans_->find(call.key);
    if (found == plans_->end()) {
      learn(op, stack, call, target);
      return true;
    }
    const auto plan = found->second;  // a reference of its own: while Python runs, another thread may replace it
    if (!plan->usable) return false;
    return run(*target, *plan, schema, stack, call, operands);
  }

  bool take(Call& call, const c10::IValue& value, bool is_number, const c10::FunctionSchema& schema,
            c10::ArrayRef<c10::IValue> arguments, size_t index) {
    if (value.isTensor()) return take_tensor(call, value.toTensor());
    if (value.isInt() || value.isDouble() || value.isBool()) {
      const bool is_default = is_number && equals_default(schema, arguments, index);
      if (is_number && !is_default) return take_number(call, value);
      call.add(is_default ? 'e' : 'c');
      // A number that equals its default is a part of the key. Python gets it unless PyTorch leaves it out.
      const bool passed = is_default && !left_out(schema, arguments, index);
      return passed ? take_number(call, value) : take_plain(call, value);
    }
    if (value.isList()) {
      const auto items = value.toListRef();
      call.add('l');
      call.add(items.size());
      for (const auto& item : items) {
        if (item.isTensor()) {
          if (!take_tensor(call, item.toTensor())) return false;
        } else if (is_number && (item.isInt() || item.isDouble() || item.isBool())) {
          if (!take_number(call, item)) return false;
        } else if (!take_plain(call, item)) {
          return false;
        }
      }
      return true;
    }
    return take_plain(call, value);
  }

  static bool equals_default(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments, size_t index) {
    const auto& given = schema.arguments()[index].default_value();
    return given.has_value() && *given == arguments[index];
  }

  // PyTorch gives Python no keyword that equals its default, and no positional one if that holds for all behind it.
  static bool left_out(const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments, size_t index) {
    if (schema.arguments()[index].kwarg_only()) return true;
    for (size_t later = index + 1; later < arguments.size(); ++later) {
      if (schema.arguments()[later].kwarg_only()) break;
      if (!equals_default(schema, arguments, later)) return false;
    }
    return true;
  }

  bool take_number(Call& call, const c10::IValue& value) {
    if (value.isBool()) {
      push_number(call, 'b', value.toBool());
      call.add('B');
    } else if (value.isInt()) {
      push_number(call, 'i', value.toInt());
      call.add('I');
    } else {
      call.push('f', value.toDouble());
      call.add('F');
    }
    return true;
  }

  bool take_plain(Call& call, const c10::IValue& value) {
    if (value.isNone()) {
      call.add('n');
    } else if (value.isBool()) {
      call.add('b');
      call.add(value.toBool());
    } else if (value.isInt()) {
      call.add('i');
      call.add(value.toInt());
    } else if (value.isDouble()) {
      call.add('d');
      call.add(value.toDouble());
    } else if (value.isComplexDouble()) {
      call.add('z');
      call.add(value.toComplexDouble());
    } else if (value.isString()) {
      const auto text = value.toStringView();
      call.add('s');
      call.add(text.size());
      call.key.append(text);
    } else if (value.isDevice()) {
      const auto device = value.toDevice();
      call.add('v');
      call.add(device.type());
      call.add(device.index());
    } else {
      return false;
    }
    return true;
  }

  bool take_tensor(Call& call, const at::Tensor& tensor) {
    if (!tensor.defined()) {
      call.add('n');
      return true;
    }
    const auto keys = tensor.key_set();
    if (tensor.layout() != c10::kStrided || keys.has_any(unusual())) return false;
    if (tensor.device().type() == c10::DeviceType::PrivateUse1) {
      if (tensor.device().index() != 0) return false;
      const auto sizes = tensor.sizes(), strides = tensor.strides();
      call.add('t');
      call.add(tensor.scalar_type());
      call.add(static_cast<uint8_t>(sizes.size()));
      call.key.append(reinterpret_cast<const char*>(sizes.data()), sizes.size() * sizeof(int64_t));
      call.key.append(reinterpret_cast<const char*>(strides.data()), strides.size() * sizeof(int64_t));
      call.add(tensor.storage_offset());
      call.tensors.push_back(&tensor);
      return true;
    }
    // The 2.0 of `x * 2.0` comes as a tensor of the CPU, which counts as a number where dtypes are promoted.
    if (!tensor.unsafeGetTensorImpl()->is_wrapped_number()) return false;
    if (tensor.scalar_type() == c10::ScalarType::Double) {
      call.push('f', *static_cast<const double*>(tensor.const_data_ptr()));
      call.add('X');
    } else if (tensor.scalar_type() == c10::ScalarType::Long) {
      push_number(call, 'i', *static_cast<const int64_t*>(tensor.const_data_ptr()));
      call.add('Y');
    } else if (tensor.scalar_type() == c10::ScalarType::Bool) {
      push_number(call, 'b', *static_cast<const bool*>(tensor.const_data_ptr()));
      call.add('Z');
    } else {
      return false;
    }
    return true;
  }

  static c10::DispatchKeySet unusual() {
    return c10::DispatchKeySet({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor,
                                c10::DispatchKey::Python, c10::DispatchKey::Functionalize});
  }

  static bool handle_of(const at::Tensor& tensor, uint64_t& handle) {
    const Object storage(THPStorage_Wrap(tensor.storage()));
    const Object remote(storage ? PyObject_GetAttr(storage.get(), name_remote) : nullptr);
    const Object found(remote ? PyObject_GetAttr(remote.get(), name_handle) : nullptr);
    if (!found) {
      PyErr_Clear();
      return false;  // Python says what is wrong with it
    }
    handle = PyLong_AsUnsignedLongLong(found.get());
    return true;
  }

  // Let Python do the call, and keep the plan of it. The session's lock is held, so that the plan is of this call.
  void learn(const c10::OperatorHandle& op, torch::jit::Stack* stack, const Call& call,
             const std::shared_ptr<const Target>& target) {
    if (PyObject_SetAttr(function_, name_kind, Py_None) < 0) raise();
    const auto inputs = call.tensors.size();
    op.redispatchBoxed(c10::DispatchKeySet(kPython), stack);  // `call.tensors` are not to be used from here on
    const auto kind = attribute(function_, name_kind);
    if (target != current) return;
    auto plan = std::make_shared<Plan>();
    if (kind.get() != Py_None)
      plan->usable = read(*plan, kind.get(), inputs, call.kinds) &&
                     (gives_list(op.schema()) || plan->outputs.size() == op.schema().returns().size());
    plans_->insert_or_assign(call.key, std::move(plan));
  }

  // Read a plan: (prefix, number of inputs, kinds of numbers, outputs). False if the call was taken apart differently.
  static bool read(Plan& plan, PyObject* kind, size_t inputs, const std::string& kinds) {
    const auto made = checked(PyObject_CallMethodNoArgs(kind, name_plan));
    PyObject *prefix, *outputs;
    Py_ssize_t announced;
    const char* numbers;
    if (!PyArg_ParseTuple(made.get(), "SnsO!", &prefix, &announced, &numbers, &PyTuple_Type, &outputs)) raise();
    if (static_cast<size_t>(announced) != inputs || kinds != numbers) return false;
    plan.prefix.assign(PyBytes_AS_STRING(prefix), PyBytes_GET_SIZE(prefix));
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(outputs); ++at) {
      Output output;
      PyObject *dtype = nullptr, *shape = nullptr, *stride = nullptr;
      long long what, value;
      int contiguous = 1;
      if (!PyArg_ParseTuple(PyTuple_GET_ITEM(outputs, at), "LL|OO!O!p", &what, &value, &dtype, &PyTuple_Type, &shape,
                            &PyTuple_Type, &stride, &contiguous))
        raise();
      output.kind = what;
      output.value = value;
      output.contiguous = contiguous != 0;
      if (what == Output::Same && (value < 0 || static_cast<size_t>(value) >= inputs)) return false;
      if (what == Output::New) {
        output.dtype = reinterpret_cast<THPDtype*>(dtype)->scalar_type;
        output.nbytes = checked(PyLong_FromLongLong(value));
        for (Py_ssize_t axis = 0; axis < PyTuple_GET_SIZE(shape); ++axis) {
          output.shape.push_back(integer(PyTuple_GET_ITEM(shape, axis)));
          output.stride.push_back(integer(PyTuple_GET_ITEM(stride, axis)));
        }
        plan.allocated += value;
      }
      plan.outputs.push_back(std::move(output));
    }
    return true;
  }

  bool run(const Target& target, const Plan& plan, const c10::FunctionSchema& schema, torch::jit::Stack* stack,
           const Call& call, std::vector<uint64_t>& operands) {
    if (!allocate(target, plan.allocated)) return false;
    operands.insert(operands.end(), call.numbers.begin(), call.numbers.end());
    std::vector<c10::IValue> results;
    results.reserve(plan.outputs.size());
    for (const auto& output : plan.outputs) {
      switch (output.kind) {
        case Output::New:
          results.emplace_back(made(target, output, operands));
          break;
        case Output::Same:
          results.emplace_back(*call.tensors[output.value]);
          break;
        case Output::Fixed:
          results.emplace_back(output.value);
          break;
        default:
          results.emplace_back(at::Tensor());
      }
    }
    const auto bytes = operands.size() * sizeof(uint64_t);
    const auto encoded = checked(PyBytes_FromStringAndSize(nullptr, plan.prefix.size() + bytes));
    std::memcpy(PyBytes_AS_STRING(encoded.get()), plan.prefix.data(), plan.prefix.size());
    std::memcpy(PyBytes_AS_STRING(encoded.get()) + plan.prefix.size(), operands.data(), bytes);
    checked(PyObject_CallOneArg(target.call.get(), encoded.get()));
    torch::jit::drop(*stack, schema.arguments().size());
    if (gives_list(schema)) {
      c10::List<at::Tensor> list;
      list.reserve(results.size());
      for (auto& result : results) list.push_back(std::move(result).toTensor());
      stack->emplace_back(std::move(list));
    } else {
      for (auto& result : results) stack->push_back(std::move(result));
    }
    return true;
  }

  static bool gives_list(const c10::FunctionSchema& schema) {
    const auto& returns = schema.returns();
    return returns.size() == 1 && returns[0].type()->kind() == c10::TypeKind::ListType;
  }

  // Count bytes, as `Session.remote` does; false if they do not fit.
  static bool allocate(const Target& target, int64_t nbytes) {
    if (nbytes == 0) return true;
    PyObject* session = target.session.get();
    const auto used = integer(attribute(session, name_used).get()) + nbytes;
    if (used > target.memory) return false;
    const auto after = checked(PyLong_FromLongLong(used));
    if (PyObject_SetAttr(session, name_used, after.get()) < 0) raise();
    if (used > integer(attribute(session, name_peak).get()) &&
        PyObject_SetAttr(session, name_peak, after.get()) < 0)
      raise();
    return true;
  }

  static at::Tensor made(const Target& target, const Output& output, std::vector<uint64_t>& operands) {
    PyObject* arguments[] = {output.nbytes.get(), target.freed.get()};
    const auto remote = checked(PyObject_Vectorcall(target.remote.get(), arguments, 2, nullptr));
    operands.push_back(PyLong_AsUnsignedLongLong(attribute(remote.get(), name_handle).get()));
    // Its size counts only where PyTorch looks at it: a contiguous tensor may have any, and others get theirs.
    c10::Storage storage(c10::Storage::use_byte_size_t(), 0, c10::GetAllocator(c10::DeviceType::Meta), true);
    storage.set_data_ptr_noswap(at::DataPtr(nullptr, c10::Device(c10::DeviceType::PrivateUse1, 0)));
    if (!output.contiguous) storage.set_nbytes(output.value);
    const auto wrapper = checked(THPStorage_Wrap(storage));
    if (PyObject_SetAttr(wrapper.get(), name_remote, remote.get()) < 0) raise();
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(kDevice), c10::scalarTypeToTypeMeta(output.dtype));
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(output.shape, output.stride, 0);
    return tensor;
  }

  PyObject* function_;
  std::vector<bool> is_number_;
  uint64_t planned_for_ = 0;  // the number of the target that all plans are for
  // Never destroyed: the dispatcher destroys its kernels after Python has shut down, and plans hold objects of Python.
  std::unordered_map<std::string, std::shared_ptr<Plan>>* const plans_ =
      new std::unordered_map<std::string, std::shared_ptr<Plan>>();
};

// Views are computed by the kernels of the meta device, which touch no memory.
class View final : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), stack);
  }
};

// The device guard, which autograd calls several times per operator. As PyTorch's own for Python backends: one device,
// no streams.
class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return c10::Device(type(), 0); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}

 private:
  c10::Stream stream() const { return c10::Stream(c10::Stream::DEFAULT, getDevice()); }
};

torch::Library& library(const std::string& name) {
  static auto* libraries = new std::unordered_map<std::string, torch::Library>();
  auto found = libraries->find(name);
  if (found == libraries->end())
    found = libraries->emplace(std::piecewise_construct, std::forward_as_tuple(name),
                               std::forward_as_tuple(torch::Library::IMPL, name, kDevice, __FILE__, __LINE__))
                .first;
  return found->second;
}

template <typename Function>
PyObject* guarded(Function function) {
  HANDLE_TH_ERRORS
  function();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// register(namespace, operator with its overload, function, is_number)
PyObject* register_operator(PyObject*, PyObject* arguments) {
  const char *space, *name;
  PyObject *function, *flags;
  if (!PyArg_ParseTuple(arguments, "ssOO!", &space, &name, &function, &PyTuple_Type, &flags)) return nullptr;
  return guarded([&] {
    std::vector<bool> is_number;
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(flags); ++at)
      is_number.push_back(PyTuple_GET_ITEM(flags, at) == Py_True);
    library(space).impl(
        name, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(function, std::move(is_number))));
  });
}

// register_view(operator)
PyObject* register_view(PyObject*, PyObject* arguments) {
  const char* name;
  if (!PyArg_ParseTuple(arguments, "s", &name)) return nullptr;
  return guarded(
      [&] { library("aten").impl(name, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<View>())); });
}

PyObject* register_guard(PyObject*, PyObject*) {
  return guarded(
      [] { c10::impl::DeviceGuardImplRegistrar(c10::DeviceType::PrivateUse1, new Guard()); });
}

// use(session, memory, acquire, release, call, freed, remote): calls are for this session. Plans of another one, or of
// numbers of definitions that are used again, hold no more.
PyObject* use(PyObject*, PyObject* arguments) {
  long long memory;
  PyObject *session, *acquire, *release, *call, *freed, *remote;
  if (!PyArg_ParseTuple(arguments, "OLOOOOO", &session, &memory, &acquire, &release, &call, &freed, &remote))
    return nullptr;
  auto target = std::shared_ptr<const Target>(new Target{
      ++targets, memory, Object::borrowed(session), Object::borrowed(acquire), Object::borrowed(release),
      Object::borrowed(call), Object::borrowed(freed), Object::borrowed(remote)});
  current.swap(target);  // what is left of the one before goes last: its end may run Python
  active = true;
  Py_RETURN_NONE;
}

// leave(): calls go to Python.
PyObject* leave(PyObject*, PyObject*) {
  active = false;
  std::shared_ptr<const Target> before;
  current.swap(before);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"register", register_operator, METH_VARARGS, nullptr}, {"register_view", register_view, METH_VARARGS, nullptr},
    {"register_guard", register_guard, METH_NOARGS, nullptr}, {"use", use, METH_VARARGS, nullptr},
    {"leave", leave, METH_NOARGS, nullptr},                   {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "warpbus_pool_dispatch", nullptr, -1, methods};

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject* make_module() {
  name_remote = PyUnicode_InternFromString("remote");
  name_handle = PyUnicode_InternFromString("handle");
  name_used = PyUnicode_InternFromString("used");
  name_peak = PyUnicode_InternFromString("peak");
  name_kind = PyUnicode_InternFromString("kind");
  name_plan = PyUnicode_InternFromString("plan");
  return PyModule_Create(&module);
}
