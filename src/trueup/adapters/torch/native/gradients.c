/* Gradients: what autograd calls at a node of a recorded call, in place of `GradientHook` in gradients.py. */
#include "quick.h"

typedef struct {
    PyObject_HEAD
    PyObject *quick, *context, *slots; /* slots: list of (position, name) */
    int received;                      /* whether the gradients come to the call, or are its own results */
} Hook;

/* The backward call of a context in the running graph task. */
static PyObject *backward_of(const Quick *q, PyObject *context)
{
    PyObject *task = PyObject_CallObject(q->graph_task, NULL), *begun = task == NULL ? NULL : PyObject_GetAttr(context, s_backward);
    PyObject *of = begun == NULL ? NULL : PyObject_GetAttr(context, s_task);
    int same = of == NULL ? -1 : begun == Py_None ? 0 : PyObject_RichCompareBool(of, task, Py_EQ);
    if (same <= 0)
        Py_CLEAR(begun);
    if (same == 0)
        begun = PyObject_CallMethodObjArgs(context, s_backward_call, q->recorder, task, NULL);
    Py_XDECREF(task);
    Py_XDECREF(of);
    return begun;
}

static int record_gradient(const Quick *q, const Hook *hook, PyObject *of, PyObject *level, PyObject *name, PyObject *tensor)
{
    PyObject *storage = storage_of(q, tensor), *producer = NULL;
    int bad = storage == NULL;
    if (!bad && storage != Py_None) {
        int fresh = is_true(storage, s_uninitialised);
        bad = fresh < 0 || (fresh && PyObject_SetAttr(storage, s_uninitialised, Py_False));
    }
    if (!bad)
        producer = hook->received ? producer_of(storage, level) : Py_NewRef(Py_None);
    bad = producer == NULL || record_at_length(q, of, name, tensor, storage, producer, Py_None) ||
          (!hook->received && set_producer(q, tensor, storage, level, of, name));
    Py_XDECREF(storage);
    Py_XDECREF(producer);
    return bad ? -1 : 0;
}

static int record_gradients(const Quick *q, const Hook *hook, PyObject *gradients)
{
    PyObject *of = backward_of(q, hook->context), *kind = of == NULL ? NULL : PyObject_GetAttr(of, s_kind);
    PyObject *level = kind == NULL ? NULL : PyObject_GetAttr(kind, s_level);
    int recorded = level == NULL ? -1 : is_true(kind, s_recorded), bad = recorded < 0;
    for (Py_ssize_t k = 0; !bad && recorded && k < PyList_Size(hook->slots); k++) {
        PyObject *item = PyList_GetItem(hook->slots, k), *tensor = PyTuple_GetItem(gradients, PyLong_AsSsize_t(PyTuple_GetItem(item, 0)));
        bad = tensor == NULL || (tensor != Py_None && record_gradient(q, hook, of, level, PyTuple_GetItem(item, 1), tensor));
    }
    Py_XDECREF(of);
    Py_XDECREF(kind);
    Py_XDECREF(level);
    return bad ? -1 : 0;
}

/* Take an exception of ours to the session, which tells whether the training goes on: 0 if it does, -1 with the exception set. */
static int survive(const Quick *q, const Hook *hook)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace != NULL)
        PyException_SetTraceback(value, trace);
    int lives = 0;
    if (PyErr_GivenExceptionMatches(value, PyExc_Exception)) {
        PyObject *of = PyObject_GetAttr(hook->context, s_call), *kind = of == NULL ? NULL : PyObject_GetAttr(of, s_kind);
        PyObject *op = kind == NULL ? NULL : PyObject_GetAttr(kind, s_op), *goes_on = NULL;
        if (op != NULL)
            goes_on = PyObject_CallMethodObjArgs(q->session, s_failed, value, op, NULL);
        lives = goes_on == NULL ? -1 : PyObject_IsTrue(goes_on);
        Py_XDECREF(of);
        Py_XDECREF(kind);
        Py_XDECREF(op);
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

static int observed(const Quick *q, const Hook *hook, PyObject *gradients)
{
    Wall wall = {.state = PyObject_GetAttr(q->threads, s_state)};
    int bad = wall.state == NULL || wall_raise(q, &wall);
    if (!bad) {
        bad = record_gradients(q, hook, gradients);
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        if (wall_lower(&wall))
            PyErr_Clear();
        PyErr_Restore(type, value, trace);
    }
    wall_clear(&wall);
    return bad && survive(q, hook) ? -1 : 0;
}

static PyObject *hook_call(PyObject *self, PyObject *args, PyObject *kwargs)
{
    const Hook *hook = (Hook *)self;
    const Quick *q = (Quick *)hook->quick;
    (void)kwargs;
    PyObject *gradients = PyTuple_GetItem(args, 0);
    int active = gradients == NULL || !PyTuple_Check(gradients) ? -1 : is_true(q->session, s_active);
    if (active < 0 && !PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError, "a hook takes the tuple of a node's gradients");
    if (active < 0 || (active && observed(q, hook, gradients)))
        return NULL;
    Py_RETURN_NONE;
}

static void hook_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Hook *hook = (Hook *)self;
    Py_XDECREF(hook->quick);
    Py_XDECREF(hook->context);
    Py_XDECREF(hook->slots);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyType_Slot HOOK_SLOTS[] = {
    {Py_tp_doc, "Records the gradients that enter or leave a call; see trueup.adapters.torch.gradients."},
    {Py_tp_call, hook_call},
    {Py_tp_dealloc, hook_dealloc},
    {0, NULL},
};

/* Not seen by the garbage collector, which would look at thousands of them: a context knows nothing of hooks. */
static PyType_Spec HOOK_SPEC = {"trueup.adapters.torch._quick.Hook", sizeof(Hook), 0, Py_TPFLAGS_DEFAULT, HOOK_SLOTS};
static PyObject *hook_type;

PyObject *quick_hook(PyObject *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3 || !PyList_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "hook(context, list of (position, slot), received)");
        return NULL;
    }
    for (Py_ssize_t k = 0; k < PyList_Size(args[1]); k++) {
        PyObject *position, *slot;
        if (pair_at(args[1], k, &position, &slot))
            return NULL;
        if (!PyLong_Check(position)) {
            PyErr_SetString(PyExc_TypeError, "hook: expected pairs of a position and a slot");
            return NULL;
        }
    }
    Hook *hook = (Hook *)PyType_GenericAlloc((PyTypeObject *)hook_type, 0);
    if (hook == NULL)
        return NULL;
    hook->quick = Py_NewRef(self);
    hook->context = Py_NewRef(args[0]);
    hook->slots = Py_NewRef(args[1]);
    hook->received = PyObject_IsTrue(args[2]);
    return (PyObject *)hook;
}

int gradients_init(void) { return hook_type != NULL || (hook_type = PyType_FromSpec(&HOOK_SPEC)) != NULL ? 0 : -1; }
