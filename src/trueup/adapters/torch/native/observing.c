/* The wall around our own work, in place of `Observing` in observing.py. */
#include "quick.h"

typedef struct {
    PyObject_HEAD
    PyObject *quick, *state, *what, *before, *plain;
} Observing;

static PyObject *observing_enter(PyObject *self, PyObject *none)
{
    Observing *o = (Observing *)self;
    (void)none;
    Py_XDECREF(o->before);
    Py_XDECREF(o->plain);
    o->plain = NULL;
    if ((o->before = PyObject_GetAttr(o->state, s_busy)) == NULL || PyObject_SetAttr(o->state, s_busy, Py_True) ||
        (o->plain = PyObject_CallObject(((Quick *)o->quick)->no_overrides, NULL)) == NULL)
        return NULL;
    return call(o->plain, s___enter__);
}

static PyObject *observing_exit(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    Observing *o = (Observing *)self;
    if (count != 3 || o->plain == NULL) {
        PyErr_SetString(PyExc_TypeError, "__exit__(type, error, traceback), after __enter__");
        return NULL;
    }
    PyObject *done = PyObject_CallMethodObjArgs(o->plain, s___exit__, args[0], args[1], args[2], NULL);
    Py_XDECREF(done);
    if (done == NULL || PyObject_SetAttr(o->state, s_busy, o->before))
        return NULL;
    if (args[1] == Py_None || !PyErr_GivenExceptionMatches(args[1], PyExc_Exception))
        Py_RETURN_FALSE;
    return PyObject_CallMethodObjArgs(((Quick *)o->quick)->session, s_failed, args[1], o->what, NULL);
}

static void observing_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Observing *o = (Observing *)self;
    Py_XDECREF(o->quick);
    Py_XDECREF(o->state);
    Py_XDECREF(o->what);
    Py_XDECREF(o->before);
    Py_XDECREF(o->plain);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef OBSERVING_METHODS[] = {
    {"__enter__", observing_enter, METH_NOARGS, "Begin our own work."},
    {"__exit__", (PyCFunction)(void (*)(void))observing_exit, METH_FASTCALL, "End it; an exception of ours goes to the session."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot OBSERVING_SLOTS[] = {
    {Py_tp_doc, "A block of our own work; see trueup.adapters.torch.observing."},
    {Py_tp_methods, OBSERVING_METHODS},
    {Py_tp_dealloc, observing_dealloc},
    {0, NULL},
};

static PyType_Spec OBSERVING_SPEC = {"trueup.adapters.torch._quick.Observing", sizeof(Observing), 0, Py_TPFLAGS_DEFAULT, OBSERVING_SLOTS};
static PyObject *observing_type;

PyObject *quick_observing(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "observing(state, what)");
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot((PyTypeObject *)observing_type, Py_tp_alloc);
    Observing *o = (Observing *)allocate((PyTypeObject *)observing_type, 0);
    if (o == NULL)
        return NULL;
    o->quick = Py_NewRef(self);
    o->state = Py_NewRef(args[0]);
    o->what = Py_NewRef(args[1]);
    return (PyObject *)o;
}

int observing_init(void) { return observing_type != NULL || (observing_type = PyType_FromSpec(&OBSERVING_SPEC)) != NULL ? 0 : -1; }
