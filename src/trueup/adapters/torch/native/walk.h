#ifndef TRUEUP_WALK_H
#define TRUEUP_WALK_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

PyObject *named_tensors(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *set_types(PyObject *self, PyObject *args);

#endif
