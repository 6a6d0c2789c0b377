/* The call stack of a call: what `trueup.recording.recorder.sites` walks, on the same dictionaries. */
#include "calls.h"

enum { MOST = 2 * 48 }; /* entries of a key: 2 * sites.MAX_FRAMES */

/* Whether frames of a code are kept: 1, 0, or -1 with an exception set. */
static int is_kept(const Quick *q, PyObject *code, PyObject *number)
{
    PyObject *entry = PyDict_GetItemWithError(q->codes, number);
    Py_XINCREF(entry);
    if (entry == NULL && !PyErr_Occurred())
        entry = PyObject_CallMethodObjArgs(q->sites, s__judge, code, NULL);
    PyObject *kept = entry == NULL ? NULL : PyTuple_GetItem(entry, 0);
    int found = kept == NULL ? -1 : kept == Py_True;
    Py_XDECREF(entry);
    return found;
}

/* Add a frame to a key, if it is kept: 0; 1 at the frame where the walk ends; -1 with an exception set. */
static int add_frame(const Quick *q, PyObject *frame, PyObject *key, int ends)
{
    PyObject *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
    PyObject *number = PyLong_FromVoidPtr(code), *offset = NULL;
    int at_end = ends && code == q->run_module, kept = at_end || number == NULL ? 0 : is_kept(q, code, number);
    int bad = number == NULL || kept < 0;
    if (kept > 0)
        bad = PyList_Append(key, number) || (offset = PyObject_GetAttr(frame, s_f_lasti)) == NULL || PyList_Append(key, offset);
    Py_XDECREF(offset);
    Py_XDECREF(number);
    Py_DECREF(code);
    return bad ? -1 : at_end;
}

/* The number of the stack that leads here, walked up to the frame around the module whose stack is numbered `above`. */
static PyObject *stack_number(const Quick *q, PyObject *above)
{
    PyObject *frame = (PyObject *)PyEval_GetFrame(), *key = PyList_New(0), *found = NULL;
    Py_XINCREF(frame);
    int over = key == NULL || PyList_Append(key, above) ? -1 : 0;
    while (!over && frame != NULL && frame != Py_None && PyList_Size(key) < MOST) {
        over = add_frame(q, frame, key, above != Py_None);
        PyObject *back = over ? NULL : PyObject_GetAttr(frame, s_f_back);
        Py_DECREF(frame);
        frame = back;
        if (!over && back == NULL)
            over = -1;
    }
    Py_XDECREF(frame);
    if (over >= 0 && PyList_Size(key) == 1) {
        found = Py_NewRef(above);
    } else if (over >= 0) {
        PyObject *frames = PyList_AsTuple(key);
        found = frames == NULL ? NULL : PyDict_GetItemWithError(q->known_sites, frames);
        Py_XINCREF(found);
        if (found == NULL && !PyErr_Occurred())
            found = PyObject_CallMethodObjArgs(q->sites, s__add, frames, NULL);
        Py_XDECREF(frames);
    }
    Py_XDECREF(key);
    return found;
}

PyObject *site_of(const Quick *q, PyObject *state)
{
    PyObject *module = last_of(state, s_modules), *above = NULL, *found = NULL;
    if (module == Py_None) {
        above = Py_NewRef(Py_None);
    } else if (module != NULL) {
        PyObject *of = PyObject_GetAttr(module, s_call);
        above = of == NULL ? NULL : PyObject_GetAttr(of, s_site);
        Py_XDECREF(of);
    }
    Py_XDECREF(module);
    if (above != NULL)
        found = stack_number(q, above);
    Py_XDECREF(above);
    return found;
}
