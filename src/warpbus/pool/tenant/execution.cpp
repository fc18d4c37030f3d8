// The hot path of a lease's process in C++: what `Executor._call` does for a call of a prepared definition whose tensors
// are all there, without Python's loops and conversions of arguments.
//
// `run` executes the CALLs of a batch until it meets something else: another instruction, a definition without a plan, a
// tensor that is missing or poisoned, a quota that is exhausted, a handle that is taken. It stops there before anything
// has happened, and Python does that instruction. The state of the lease stays in Python's objects. An operator's error
// and results that are not as announced go to the executor's methods.

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "python_objects.h"

namespace {

using warpbus::attribute, warpbus::checked, warpbus::integer, warpbus::Object, warpbus::raise;

using Stack = torch::jit::Stack;

constexpr uint8_t kCall = 4;  // Instruction.CALL
constexpr size_t kHead = 5;   // the instruction and the number of its definition
constexpr const char* kCapsule = "warpbus_pool_plan";

void done(int status) {
  if (status < 0) raise();
}

PyObject *name_base, *name_calls, *name_clock, *name_complete, *name_definitions, *name_fail, *name_fits, *name_live,
    *name_memory, *name_nbytes, *name_peak, *name_pending, *name_plan, *name_sizes, *name_storages, *name_used,
    *name_version, *name_views;
PyObject* storage_class;
size_t most_storages;

// Where an argument that changes from call to call goes in the stack.
struct Slot {
  enum Kind : int { Tensor = 0, Scalar = 1, Double = 2, NumberTensor = 3, Tensors = 4, OptionalTensors = 5, Scalars = 6 };
  size_t position;
  Kind kind;
  std::vector<int64_t> values;  // indices of the call's tensors or of its numbers; -1 is None
};

// The geometry of a tensor, and the object by which Python knows it.
struct Place {
  Object known;
  c10::ScalarType dtype;
  std::vector<int64_t> shape, stride;
  int64_t offset, nbytes;
  Object size;  // nbytes, as an int of Python
};

struct Plan {
  enum Results : int { None = 0, One = 1, Several = 2 };
  c10::OperatorHandle op;
  Stack arguments;  // constants, and something to replace in the slots
  std::vector<Slot> slots;
  std::vector<Place> inputs, news;
  std::string numbers;  // 'i' or 'f' of each
  std::vector<size_t> written;
  int64_t charge;
  Results results;

  explicit Plan(c10::OperatorHandle handle) : op(std::move(handle)) {}
  size_t operands() const { return inputs.size() + numbers.size() + news.size(); }
};

std::vector<int64_t> integers(PyObject* tuple) {
  std::vector<int64_t> found;
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(tuple); ++at) found.push_back(integer(PyTuple_GET_ITEM(tuple, at)));
  return found;
}

// (known, dtype, shape, stride, offset, nbytes)
Place place(PyObject* described) {
  PyObject *known, *dtype, *shape, *stride;
  long long offset, nbytes;
  if (!PyArg_ParseTuple(described, "OOO!O!LL", &known, &dtype, &PyTuple_Type, &shape, &PyTuple_Type, &stride, &offset,
                        &nbytes))
    raise();
  return {Object::borrowed(known), reinterpret_cast<THPDtype*>(dtype)->scalar_type, integers(shape), integers(stride),
          offset, nbytes, checked(PyLong_FromLongLong(nbytes))};
}

// The kind of a slot by its tag and the type of the argument; false if there is none.
bool slot_kind(const std::string& tag, const c10::Type& given, const std::vector<int64_t>& values, Slot::Kind& kind) {
  const auto* type = &given;
  c10::TypePtr inner;
  if (type->kind() == c10::TypeKind::OptionalType) {
    inner = type->expectRef<c10::OptionalType>().getElementType();
    type = inner.get();
  }
  if (tag == "tensor") {
    kind = Slot::Tensor;
    return type->kind() == c10::TypeKind::TensorType;
  }
  if (tag == "number") {
    kind = type->kind() == c10::TypeKind::NumberType   ? Slot::Scalar
           : type->kind() == c10::TypeKind::FloatType  ? Slot::Double
                                                       : Slot::NumberTensor;
    return kind != Slot::NumberTensor || type->kind() == c10::TypeKind::TensorType;
  }
  if (type->kind() != c10::TypeKind::ListType) return false;
  const auto element = type->expectRef<c10::ListType>().getElementType();
  if (tag == "numbers") {
    kind = Slot::Scalars;
    return element->kind() == c10::TypeKind::NumberType;
  }
  kind = element->kind() == c10::TypeKind::TensorType ? Slot::Tensors : Slot::OptionalTensors;
  if (kind == Slot::Tensors) return std::find(values.begin(), values.end(), -1) == values.end();
  return element->kind() == c10::TypeKind::OptionalType &&
         element->expectRef<c10::OptionalType>().getElementType()->kind() == c10::TypeKind::TensorType;
}

// Without PyTorch's macros, which make Python's warnings of an operator's.
template <typename Function>
PyObject* guarded(Function function) {
  try {
    return function();
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

PyObject* none() {
  Py_INCREF(Py_None);
  return Py_None;
}

// prepare(operator, overload, arguments, inputs, numbers, news, written, results): a plan, or None.
//
// An argument is None for the schema's default, ("constant", value) or (tag, indices).
PyObject* prepare(PyObject*, PyObject* given) {
  const char *name, *overload, *numbers;
  PyObject *arguments, *inputs, *news, *written;
  int results;
  if (!PyArg_ParseTuple(given, "ssO!O!sO!O!i", &name, &overload, &PyTuple_Type, &arguments, &PyTuple_Type, &inputs,
                        &numbers, &PyTuple_Type, &news, &PyTuple_Type, &written, &results))
    return nullptr;
  return guarded([&]() -> PyObject* {
    auto plan = std::make_unique<Plan>(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload));
    const auto& schema = plan->op.schema();
    plan->numbers = numbers;
    plan->results = static_cast<Plan::Results>(results);
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(inputs); ++at)
      plan->inputs.push_back(place(PyTuple_GET_ITEM(inputs, at)));
    plan->charge = 0;
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(news); ++at) {
      plan->news.push_back(place(PyTuple_GET_ITEM(news, at)));
      plan->charge += plan->news.back().nbytes;
    }
    const auto inside = [](const std::vector<int64_t>& indices, int64_t least, size_t end) {
      return std::all_of(indices.begin(), indices.end(), [&](int64_t each) {
        return each >= least && each < static_cast<int64_t>(end);
      });
    };
    const auto changed = integers(written);
    if (!inside(changed, 0, plan->inputs.size())) return none();
    plan->written.assign(changed.begin(), changed.end());
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(arguments); ++at) {
      const auto& argument = schema.arguments().at(at);
      PyObject* item = PyTuple_GET_ITEM(arguments, at);
      if (item == Py_None) {
        if (!argument.default_value()) return none();
        plan->arguments.push_back(*argument.default_value());
        continue;
      }
      const char* tag;
      PyObject* value;
      if (!PyArg_ParseTuple(item, "sO", &tag, &value)) raise();
      if (std::string(tag) == "constant") {
        plan->arguments.push_back(torch::jit::argumentToIValue(schema, at, value));
        continue;
      }
      Slot slot{static_cast<size_t>(at), Slot::Tensor, integers(value)};
      if (!slot_kind(tag, *argument.real_type(), slot.values, slot.kind)) return none();
      const bool of_tensors = tag[0] == 't';
      if (!inside(slot.values, of_tensors ? -1 : 0, of_tensors ? plan->inputs.size() : plan->numbers.size()))
        return none();
      plan->arguments.emplace_back();
      plan->slots.push_back(std::move(slot));
    }
    const auto capsule = PyCapsule_New(plan.get(), kCapsule, [](PyObject* object) {
      delete static_cast<Plan*>(PyCapsule_GetPointer(object, kCapsule));
    });
    if (capsule != nullptr) plan.release();
    return capsule;
  });
}

// The lease, as a batch finds it.
class Lease {
 public:
  explicit Lease(PyObject* executor)
      : executor_(executor),
        storages_(attribute(executor, name_storages)),
        definitions_(attribute(executor, name_definitions)),
        live_(attribute(storages_.get(), name_live)),
        sizes_(attribute(storages_.get(), name_sizes)) {}

  // Execute the CALLs from `at` on. Returns where it stopped.
  size_t run(const uint8_t* data, size_t end, size_t at) {
    while (at + kHead <= end && data[at] == kCall) {
      uint32_t number;
      std::memcpy(&number, data + at + 1, sizeof number);
      const auto key = checked(PyLong_FromUnsignedLong(number));
      const auto definition = Object::borrowed(PyDict_GetItemWithError(definitions_.get(), key.get()));
      if (!definition) break;
      const auto capsule = attribute(definition.get(), name_plan);
      if (capsule.get() == Py_None) break;
      const auto* plan = static_cast<const Plan*>(PyCapsule_GetPointer(capsule.get(), kCapsule));
      if (plan == nullptr) raise();
      const auto bytes = plan->operands() * sizeof(uint64_t);
      if (end - at - kHead < bytes) break;
      std::vector<uint64_t> operands(plan->operands());
      std::memcpy(operands.data(), data + at + kHead, bytes);
      if (!call(*plan, definition.get(), operands)) break;
      at += kHead + bytes;
    }
    return at;
  }

 private:
  // Do a call; false if it is Python's, and nothing has happened.
  bool call(const Plan& plan, PyObject* definition, const std::vector<uint64_t>& operands) {
    std::vector<Object> storages, values;
    std::vector<at::Tensor> tensors;
    storages.reserve(plan.inputs.size());
    values.reserve(plan.inputs.size());
    tensors.reserve(plan.inputs.size());
    for (size_t index = 0; index < plan.inputs.size(); ++index) {
      const auto handle = checked(PyLong_FromUnsignedLongLong(operands[index]));
      storages.push_back(Object::borrowed(PyDict_GetItemWithError(live_.get(), handle.get())));
      if (!storages.back()) return left();
      auto found = tensor(storages.back().get(), plan.inputs[index]);
      if (!found) return left();
      tensors.push_back(THPVariable_Unpack(found.get()));
      values.push_back(std::move(found));
    }
    std::vector<Object> handles;
    handles.reserve(plan.news.size());
    std::unordered_set<uint64_t> chosen;
    for (size_t index = plan.inputs.size() + plan.numbers.size(); index < operands.size(); ++index) {
      if (operands[index] >> 63 || !chosen.insert(operands[index]).second) return left();
      handles.push_back(checked(PyLong_FromUnsignedLongLong(operands[index])));
      if (PyDict_GetItemWithError(live_.get(), handles.back().get()) != nullptr) return left();
    }
    if (PyDict_GET_SIZE(live_.get()) + handles.size() > most_storages) return left();
    if (!charge(plan.charge)) return left();
    auto stack = arguments(plan, tensors, operands);
    bool ran = false;
    try {
      pybind11::gil_scoped_release no_gil;
      plan.op.callBoxed(stack);
      ran = true;
    } catch (...) {
      failure_ = std::current_exception();
    }
    if (!ran) {
      fail(plan, definition, operands);
      return true;
    }
    if (!keep(plan, tensors, handles, stack)) {
      tensors.clear();
      complete(plan, definition, operands, values, stack);
      return true;
    }
    for (const auto index : plan.written)
      done(PyObject_SetAttr(storages[index].get(), name_version, tick().get()));
    return count();
  }

  static bool left() {
    if (PyErr_Occurred()) raise();
    return false;
  }

  // The tensor of a storage at a place; null if that is Python's to say.
  static Object tensor(PyObject* storage, const Place& place) {
    const auto views = attribute(storage, name_views);
    auto found = Object::borrowed(PyDict_GetItemWithError(views.get(), place.known.get()));
    if (found || PyErr_Occurred()) return found;
    const auto base = attribute(storage, name_base);
    if (!THPVariable_Check(base.get()) || attribute(storage, name_pending).get() != Py_None) return Object();
    const auto fits = integer(attribute(place.known.get(), name_fits).get());
    if (fits < 0 || integer(attribute(storage, name_nbytes).get()) < fits) return Object();
    const auto& memory = THPVariable_Unpack(base.get());
    if (memory.scalar_type() != place.dtype) return Object();
    found = checked(THPVariable_Wrap(memory.as_strided(place.shape, place.stride, place.offset)));
    done(PyDict_SetItem(views.get(), place.known.get(), found.get()));
    return found;
  }

  // As `Storages.charge`; false if the bytes do not fit.
  bool charge(int64_t nbytes) {
    if (nbytes == 0) return true;
    const auto used = integer(attribute(storages_.get(), name_used).get()) + nbytes;
    if (used > integer(attribute(storages_.get(), name_memory).get())) return false;
    const auto after = checked(PyLong_FromLongLong(used));
    done(PyObject_SetAttr(storages_.get(), name_used, after.get()));
    if (used > integer(attribute(storages_.get(), name_peak).get()))
      done(PyObject_SetAttr(storages_.get(), name_peak, after.get()));
    return true;
  }

  static Stack arguments(const Plan& plan, const std::vector<at::Tensor>& tensors,
                         const std::vector<uint64_t>& operands) {
    auto stack = plan.arguments;
    const auto scalar = [&](int64_t index) -> at::Scalar {
      const auto bits = operands[plan.inputs.size() + index];
      if (plan.numbers[index] == 'i') return static_cast<int64_t>(bits);
      double value;
      std::memcpy(&value, &bits, sizeof value);
      return value;
    };
    for (const auto& slot : plan.slots) {
      auto& target = stack[slot.position];
      switch (slot.kind) {
        case Slot::Tensor:
          target = tensors[slot.values[0]];
          break;
        case Slot::Scalar:
          target = scalar(slot.values[0]);
          break;
        case Slot::Double:
          target = scalar(slot.values[0]).toDouble();
          break;
        case Slot::NumberTensor: {
          auto wrapped = at::scalar_to_tensor(scalar(slot.values[0]));
          wrapped.unsafeGetTensorImpl()->set_wrapped_number(true);
          target = std::move(wrapped);
          break;
        }
        case Slot::Tensors: {
          c10::List<at::Tensor> list;
          list.reserve(slot.values.size());
          for (const auto index : slot.values) list.push_back(tensors[index]);
          target = std::move(list);
          break;
        }
        case Slot::OptionalTensors: {
          c10::List<std::optional<at::Tensor>> list;
          list.reserve(slot.values.size());
          for (const auto index : slot.values)
            list.push_back(index < 0 ? std::nullopt : std::optional<at::Tensor>(tensors[index]));
          target = std::move(list);
          break;
        }
        case Slot::Scalars: {
          c10::impl::GenericList list(c10::NumberType::get());
          list.reserve(slot.values.size());
          for (const auto index : slot.values) list.push_back(scalar(index));
          target = std::move(list);
          break;
        }
      }
    }
    return stack;
  }

  // Store the results if they are as announced, in memory that nothing else uses. Otherwise false, and nothing is stored.
  bool keep(const Plan& plan, const std::vector<at::Tensor>& inputs, const std::vector<Object>& handles, Stack& stack) {
    if (plan.results == Plan::None) return true;
    std::vector<at::Tensor> results;
    results.reserve(plan.news.size());
    if (stack.size() == 1 && stack[0].isTensorList()) {
      for (const at::Tensor& each : stack[0].toTensorVector()) results.push_back(each);
    } else {
      for (const auto& each : stack) {
        if (!each.isTensor()) return false;
        results.push_back(each.toTensor());
      }
    }
    if (results.size() != plan.news.size()) return false;
    std::unordered_set<const void*> known;
    for (const auto& input : inputs) known.insert(input.unsafeGetTensorImpl());
    for (size_t index = 0; index < results.size(); ++index) {
      const auto& result = results[index];
      const auto& place = plan.news[index];
      if (!result.defined() || result.sizes() != place.shape || result.strides() != place.stride ||
          result.scalar_type() != place.dtype || !result.has_storage() ||
          result.storage().nbytes() != static_cast<size_t>(place.nbytes) || result.storage().use_count() != 1 ||
          !known.insert(result.unsafeGetTensorImpl()).second)
        return false;
    }
    for (size_t index = 0; index < results.size(); ++index) {
      const auto& place = plan.news[index];
      const auto wrapped = checked(THPVariable_Wrap(results[index]));
      const auto views = checked(PyDict_New());
      done(PyDict_SetItem(views.get(), place.known.get(), wrapped.get()));
      const auto clock = tick();
      PyObject* fields[] = {place.size.get(), wrapped.get(), views.get(), clock.get()};
      const auto storage = checked(PyObject_Vectorcall(storage_class, fields, 4, nullptr));
      done(PyDict_SetItem(live_.get(), handles[index].get(), storage.get()));
      done(PyDict_SetItem(sizes_.get(), handles[index].get(), place.size.get()));
    }
    return true;
  }

  // The next version.
  Object tick() {
    auto next = checked(PyLong_FromLongLong(integer(attribute(storages_.get(), name_clock).get()) + 1));
    done(PyObject_SetAttr(storages_.get(), name_clock, next.get()));
    return next;
  }

  bool count() {
    const auto next = checked(PyLong_FromLongLong(integer(attribute(executor_, name_calls).get()) + 1));
    done(PyObject_SetAttr(executor_, name_calls, next.get()));
    return true;
  }

  // The operands as Python's layout unpacks them.
  static Object unpacked(const Plan& plan, const std::vector<uint64_t>& operands) {
    auto tuple = checked(PyTuple_New(static_cast<Py_ssize_t>(operands.size())));
    for (size_t index = 0; index < operands.size(); ++index) {
      const auto number = index - plan.inputs.size();  // wraps around for those before
      PyObject* value;
      if (number < plan.numbers.size() && plan.numbers[number] == 'f') {
        double real;
        std::memcpy(&real, &operands[index], sizeof real);
        value = PyFloat_FromDouble(real);
      } else if (number < plan.numbers.size()) {
        value = PyLong_FromLongLong(static_cast<int64_t>(operands[index]));
      } else {
        value = PyLong_FromUnsignedLongLong(operands[index]);
      }
      if (value == nullptr) raise();
      PyTuple_SET_ITEM(tuple.get(), index, value);
    }
    return tuple;
  }

  void fail(const Plan& plan, PyObject* definition, const std::vector<uint64_t>& operands) {
    torch::translate_exception_to_python(std::exchange(failure_, nullptr));
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    const Object of_type(type), error(value), of_traceback(traceback);
    checked(PyObject_CallMethodObjArgs(executor_, name_fail, definition, unpacked(plan, operands).get(), error.get(),
                                       nullptr));
  }

  // Let Python store what an operator gave.
  void complete(const Plan& plan, PyObject* definition, const std::vector<uint64_t>& operands,
                const std::vector<Object>& values, Stack& stack) {
    const auto given = unpacked(plan, operands);
    const auto arguments = checked(PyList_New(0));
    for (const auto& value : values) done(PyList_Append(arguments.get(), value.get()));
    Object result;
    if (stack.size() == 1) {
      result = Object(torch::jit::toPyObject(std::move(stack[0])).release().ptr());
    } else {
      result = checked(PyTuple_New(static_cast<Py_ssize_t>(stack.size())));
      for (size_t index = 0; index < stack.size(); ++index)
        PyTuple_SET_ITEM(result.get(), index, torch::jit::toPyObject(std::move(stack[index])).release().ptr());
    }
    stack.clear();
    checked(PyObject_CallMethodObjArgs(executor_, name_complete, definition, given.get(), arguments.get(), result.get(),
                                       nullptr));
  }

  PyObject* executor_;
  Object storages_, definitions_, live_, sizes_;
  std::exception_ptr failure_;
};

// run(executor, batch, at): execute the calls from `at` on that need no Python. Returns where it stopped.
PyObject* run(PyObject*, PyObject* given) {
  PyObject *executor, *batch;
  Py_ssize_t at;
  if (!PyArg_ParseTuple(given, "OOn", &executor, &batch, &at)) return nullptr;
  Py_buffer view;
  if (PyObject_GetBuffer(batch, &view, PyBUF_SIMPLE) < 0) return nullptr;
  const auto release = [](Py_buffer* held) { PyBuffer_Release(held); };
  const std::unique_ptr<Py_buffer, decltype(release)> held(&view, release);
  return guarded([&] {
    return PyLong_FromSize_t(
        Lease(executor).run(static_cast<const uint8_t*>(view.buf), static_cast<size_t>(view.len), static_cast<size_t>(at)));
  });
}

// use(class of storages, the most storages of a lease)
PyObject* use(PyObject*, PyObject* given) {
  Py_ssize_t most;
  PyObject* storage;
  if (!PyArg_ParseTuple(given, "On", &storage, &most)) return nullptr;
  Py_INCREF(storage);
  storage_class = storage;
  most_storages = static_cast<size_t>(most);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {{"prepare", prepare, METH_VARARGS, nullptr},
                         {"run", run, METH_VARARGS, nullptr},
                         {"use", use, METH_VARARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "warpbus_pool_execution", nullptr, -1, methods};

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject* make_module() {
  const std::pair<PyObject**, const char*> names[] = {
      {&name_base, "base"},           {&name_calls, "calls"},       {&name_clock, "clock"},
      {&name_complete, "_complete"}, {&name_definitions, "_definitions"}, {&name_fail, "_failed_call"},
      {&name_fits, "_fits"},          {&name_live, "live"},         {&name_memory, "memory"},
      {&name_nbytes, "nbytes"},       {&name_peak, "peak"},         {&name_pending, "pending"},
      {&name_plan, "plan"},           {&name_sizes, "_sizes"},      {&name_storages, "storages"},
      {&name_used, "used"},           {&name_version, "version"},   {&name_views, "views"}};
  for (const auto& [target, name] : names) *target = PyUnicode_InternFromString(name);
  return PyModule_Create(&module);
}
