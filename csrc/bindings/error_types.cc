#include "bindings/error_types.h"

#include "process_group/errors.h"

namespace py = pybind11;

namespace smddp::bindings {
namespace {

// Never destroyed, because errors may be translated while the interpreter ends.
py::dict& errorTypes() {
  static auto* types = new py::dict;
  return *types;
}

py::object classOf(const process_group::BackendError& error) {
  const char* name = toString(error.kind());
  return errorTypes().contains(name) ? errorTypes()[name].cast<py::object>()
                                     : py::reinterpret_borrow<py::object>(PyExc_RuntimeError);
}

void translate(std::exception_ptr thrown) {
  try {
    std::rethrow_exception(std::move(thrown));
  } catch (const process_group::BackendError& error) {
    PyErr_SetString(classOf(error).ptr(), error.text());
  } catch (const Error& error) {
    PyErr_SetString(error.kind() == ErrorKind::Usage ? PyExc_ValueError : PyExc_RuntimeError,
                    error.what());
  }
}

}  // namespace

void bindErrorTypes(py::module& m) {
  m.def(
      "set_error_types", [](const py::dict& types) { errorTypes() = types; }, py::arg("types"));
  // Register it globally, not for this module only: Work.wait() is a function of torch's module.
  py::register_exception_translator(&translate);
}

py::object asPythonError(const std::exception_ptr& thrown) {
  if (!thrown) return py::none();
  try {
    std::rethrow_exception(thrown);
  } catch (const process_group::BackendError& error) {
    return classOf(error)(error.text());
  } catch (const std::exception& error) {
    return py::reinterpret_borrow<py::object>(PyExc_RuntimeError)(error.what());
  }
}

}  // namespace smddp::bindings
