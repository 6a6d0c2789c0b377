/* The wall around our own work, in place of `Observing` in context.py. */
#include "calls.h"

int wall_raise(const Quick *q, Wall *wall)
{
    PyObject *done = NULL;
    Py_CLEAR(wall->before);
    Py_CLEAR(wall->plain);
    if ((wall->before = PyObject_GetAttr(wall->state, s_busy)) != NULL &&
        (wall->plain = PyObject_CallObject(q->no_overrides, NULL)) != NULL)
        done = call(wall->plain, s___enter__);
    Py_XDECREF(done);
    return done == NULL ? -1 : PyObject_SetAttr(wall->state, s_busy, Py_True);
}

int wall_lower(const Wall *wall)
{
    PyObject *done = PyObject_CallMethodObjArgs(wall->plain, s___exit__, Py_None, Py_None, Py_None, NULL);
    Py_XDECREF(done);
    return done == NULL ? -1 : PyObject_SetAttr(wall->state, s_busy, wall->before);
}

void wall_clear(Wall *wall)
{
    Py_CLEAR(wall->state);
    Py_CLEAR(wall->before);
    Py_CLEAR(wall->plain);
}

/* Take an exception of ours to the session, which tells whether the training goes on: 0 if it does, -1 with the exception set. */
int survive(const Quick *q, PyObject *what)
{
    PyObject *type, *value, *trace, *goes_on = NULL;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace != NULL)
        PyException_SetTraceback(value, trace);
    int lives = 0;
    if (PyErr_GivenExceptionMatches(value, PyExc_Exception)) {
        goes_on = PyObject_CallMethodObjArgs(q->session, s_failed, value, what, NULL);
        lives = goes_on == NULL ? -1 : PyObject_IsTrue(goes_on);
        Py_XDECREF(goes_on);
    }
    if (lives == 0) {
        PyErr_Restore(type, value, trace);
        return -1;
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return lives < 0 ? -1 : 0;
}

int guarded(const Quick *q, PyObject *state, PyObject *what, int (*work)(const Quick *q, void *data), void *data)
{
    Wall wall = {.state = Py_NewRef(state)};
    int bad = wall_raise(q, &wall);
    if (!bad) {
        bad = work(q, data);
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        if (wall_lower(&wall))
            PyErr_Clear();
        PyErr_Restore(type, value, trace);
    }
    wall_clear(&wall);
    return !bad ? 0 : survive(q, what) ? -1 : 1;
}

typedef struct {
    PyObject_HEAD
    PyObject *quick, *what;
    Wall wall;
} Observing;

static PyObject *observing_enter(PyObject *self, PyObject *none)
{
    Observing *o = (Observing *)self;
    (void)none;
    if (wall_raise((Quick *)o->quick, &o->wall))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *observing_exit(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    Observing *o = (Observing *)self;
    if (count != 3 || o->wall.plain == NULL) {
        PyErr_SetString(PyExc_TypeError, "__exit__(type, error, traceback), after __enter__");
        return NULL;
    }
    if (wall_lower(&o->wall))
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
    Py_XDECREF(o->what);
    wall_clear(&o->wall);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyMethodDef OBSERVING_METHODS[] = {
    {"__enter__", observing_enter, METH_NOARGS, "Begin our own work."},
    {"__exit__", (PyCFunction)(void (*)(void))observing_exit, METH_FASTCALL, "End it; an exception of ours goes to the session."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot OBSERVING_SLOTS[] = {
    {Py_tp_doc, "A block of our own work; see trueup.recording.adapters.torch.context.Observing."},
    {Py_tp_methods, OBSERVING_METHODS},
    {Py_tp_dealloc, observing_dealloc},
    {0, NULL},
};

static PyType_Spec OBSERVING_SPEC = {"trueup.recording.adapters.torch._quick.Observing", sizeof(Observing), 0, Py_TPFLAGS_DEFAULT, OBSERVING_SLOTS};
static PyObject *observing_type;

PyObject *quick_observing(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "observing(state, what)");
        return NULL;
    }
    Observing *o = (Observing *)PyType_GenericAlloc((PyTypeObject *)observing_type, 0);
    if (o == NULL)
        return NULL;
    o->quick = Py_NewRef(self);
    o->wall.state = Py_NewRef(args[0]);
    o->what = Py_NewRef(args[1]);
    return (PyObject *)o;
}

int observing_init(void) { return observing_type != NULL || (observing_type = PyType_FromSpec(&OBSERVING_SPEC)) != NULL ? 0 : -1; }
