/* The functions of the module `_quick` that need no session. */
#ifndef TRUEUP_FUNCTIONS_H
#define TRUEUP_FUNCTIONS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

PyObject *named_tensors(PyObject *self, PyObject *const *args, Py_ssize_t count); /* walk.c */
PyObject *set_types(PyObject *self, PyObject *args);

PyObject *note_edges(PyObject *self, PyObject *const *args, Py_ssize_t count); /* graph.c */
PyObject *boundary(PyObject *self, PyObject *args);

#endif
