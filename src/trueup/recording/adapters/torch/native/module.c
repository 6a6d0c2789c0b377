/* The module `_quick`, and the type that works for a session. */
#include "quick.h"

#include "functions.h"

#define DEFINE(name) PyObject *s_##name;
NAMES(DEFINE)

static PyObject *quick_teach(PyObject *self, PyObject *args, PyObject *kwargs)
{
    Quick *q = (Quick *)self;
    Py_ssize_t known = 0;
    PyObject *given;
#define LEARN(name) \
    if (kwargs != NULL && (given = PyDict_GetItemString(kwargs, #name)) != NULL) { \
        Py_XDECREF(q->name); \
        q->name = Py_NewRef(given); \
        known++; \
    }
    TAUGHT(LEARN)
    if (PyTuple_Size(args) || kwargs == NULL || known != PyDict_Size(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "teach: unknown keyword arguments");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"teach", (PyCFunction)(void (*)(void))quick_teach, METH_VARARGS | METH_KEYWORDS,
     "teach(**objects): what functions, operators and modules work with."},
    {"function", (PyCFunction)(void (*)(void))quick_function, METH_FASTCALL,
     "function(func, args, kwargs): execute a function and record it; see FunctionMode."},
    {"operator", (PyCFunction)(void (*)(void))quick_operator, METH_FASTCALL,
     "operator(func, args, kwargs): execute an operator and record it; see DispatchMode."},
    {"module", (PyCFunction)(void (*)(void))quick_module, METH_FASTCALL,
     "module(state, original, module, args, kwargs): call a module and record it; see modules._run."},
    {"storage", quick_storage, METH_O, "storage(tensor) -> what is known of its storage, or None; see Buffers.storage."},
    {"slot", (PyCFunction)(void (*)(void))quick_slot, METH_FASTCALL,
     "slot(call, name, tensor, storage, producer, step=None): add a row; see Slots._slot."},
    {"inputs", (PyCFunction)(void (*)(void))quick_inputs, METH_FASTCALL,
     "inputs(call, tensors, level): add a row for each (slot, tensor), with what produced it; see Slots.inputs."},
    {"outputs", (PyCFunction)(void (*)(void))quick_outputs, METH_FASTCALL,
     "outputs(call, tensors, inputs, step): add a row for each (slot, tensor), but for unwritten views; see Slots.outputs."},
    {"produced", (PyCFunction)(void (*)(void))quick_produced, METH_FASTCALL,
     "produced(call, tensors, level): note that a recorded call computed these tensors; see Slots.produced."},
    {"observing", (PyCFunction)(void (*)(void))quick_observing, METH_FASTCALL,
     "observing(state, what) -> a block of our own work; see Session.observing."},
    {"hook", (PyCFunction)(void (*)(void))quick_hook, METH_FASTCALL,
     "hook(context, slots, received) -> what to register at an autograd node; see gradients.watch."},
    {NULL, NULL, 0, NULL},
};

#define VISIT(name) Py_VISIT(q->name);
#define CLEAR(name) Py_CLEAR(q->name);
static int quick_traverse(PyObject *self, visitproc visit, void *arg)
{
    Quick *q = (Quick *)self;
    HELD(VISIT)
    TAUGHT(VISIT)
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static int quick_clear(PyObject *self)
{
    Quick *q = (Quick *)self;
    HELD(CLEAR)
    TAUGHT(CLEAR)
    return 0;
}

static void quick_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    quick_clear(self);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

static int quick_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    Quick *q = (Quick *)self;
    if (PyTuple_Size(args) || kwargs == NULL) {
        PyErr_SetString(PyExc_TypeError, "Quick takes keyword arguments only");
        return -1;
    }
    quick_clear(self);
#define TAKE(name) \
    if ((q->name = PyDict_GetItemString(kwargs, #name)) == NULL) { \
        PyErr_SetString(PyExc_TypeError, "Quick: expected the keyword argument " #name); \
        return -1; \
    } \
    Py_INCREF(q->name);
    HELD(TAKE)
    PyObject *detail = PyDict_GetItemString(kwargs, "detail"), *sees = PyDict_GetItemString(kwargs, "sees_writes");
    if (detail == NULL || sees == NULL || !PyDict_Check(q->storages) || !PyDict_Check(q->devices) || !PyDict_Check(q->layouts) ||
        !PyDict_Check(q->in_flight)) {
        PyErr_SetString(PyExc_TypeError, "Quick: expected detail and sees_writes, and dicts to look things up in");
        return -1;
    }
    q->digest_only = PyUnicode_CompareWithASCIIString(detail, "digest") == 0;
    q->keeps_bytes = PyUnicode_CompareWithASCIIString(detail, "tensor") == 0;
    q->sees_writes = PyObject_IsTrue(sees);
    PyObject *levels = PyDict_GetItemString(kwargs, "levels");
    if (levels == NULL || !PyTuple_Check(levels)) {
        PyErr_SetString(PyExc_TypeError, "Quick: expected the levels that are recorded, as a tuple");
        return -1;
    }
    PyObject *most = PyDict_GetItemString(kwargs, "most_values");
    q->most_values = most == NULL ? 0 : PyLong_AsSsize_t(most);
    q->has_module = PySequence_Contains(levels, s_module);
    q->has_api = PySequence_Contains(levels, s_api);
    q->has_aten = PySequence_Contains(levels, s_aten);
    q->only_modules = !q->has_api && !q->has_aten;
    q->follows = q->has_api || !q->has_aten;
    const TrueupEntrance *entrance = PyCapsule_GetPointer(PyDict_GetItemString(kwargs, "entrance"), TRUEUP_ENTRANCE);
    if (entrance == NULL)
        return -1;
    q->kernel = *entrance;
    return 0;
}

static PyType_Slot SLOTS[] = {
    {Py_tp_doc, "The short way from a tensor to a row; see trueup.recording.adapters.torch.session."},
    {Py_tp_init, quick_init},
    {Py_tp_dealloc, quick_dealloc},
    {Py_tp_traverse, quick_traverse},
    {Py_tp_clear, quick_clear},
    {Py_tp_methods, METHODS},
    {0, NULL},
};

static PyType_Spec SPEC = {"trueup.recording.adapters.torch._quick.Quick", sizeof(Quick), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, SLOTS};

static PyMethodDef FUNCTIONS[] = {
    {"named_tensors", (PyCFunction)(void (*)(void))named_tensors, METH_FASTCALL,
     "named_tensors(prefix, args, kwargs=None) -> list of (slot, tensor); see trueup.recording.adapters.torch.tensors."},
    {"note_edges", (PyCFunction)(void (*)(void))note_edges, METH_FASTCALL,
     "note_edges(inputs, slots, leaves): the gradient edges of a call's inputs; see gradients.Edges."},
    {"boundary", boundary, METH_VARARGS, "boundary(context, first, slots, leaves, pending, own, most); see gradients._boundary."},
    {"set_types", set_types, METH_VARARGS, "set_types(tensor, leaves, walk): what named_tensors has to know."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_quick", "The short way from a tensor to a row.", -1, FUNCTIONS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__quick(void)
{
#define INTERN(name) \
    if (s_##name == NULL && (s_##name = PyUnicode_InternFromString(#name)) == NULL) \
        return NULL;
    NAMES(INTERN)
    if (gradients_init() || observing_init() || records_init())
        return NULL;
    PyObject *module = PyModule_Create(&MODULE), *type = PyType_FromSpec(&SPEC);
    if (module == NULL || type == NULL || PyModule_AddObject(module, "Quick", type)) {
        Py_XDECREF(module);
        Py_XDECREF(type);
        return NULL;
    }
    return module;
}
