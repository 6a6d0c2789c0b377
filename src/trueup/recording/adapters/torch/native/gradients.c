/* Gradients: what autograd calls at a node of a recorded call, in place of `GradientHook` in gradients.py. */
#include "calls.h"

typedef struct {
    PyObject_HEAD
    PyObject *quick, *context, *slots; /* slots: list of (position, name) */
    int received;                      /* whether the gradients come to the call, or are its own results */
} Hook;

static PyObject *backward_in(const Quick *q, PyObject *context, PyObject *task);

/* Begin the backward call of a context, as Context.backward_call does. */
static PyObject *begin_backward(const Quick *q, PyObject *context, PyObject *task)
{
    PyObject *of = PyObject_GetAttr(context, s_call), *kind = of == NULL ? NULL : PyObject_GetAttr(of, s_kind), *begun = NULL;
    PyObject *parent = kind == NULL ? NULL : PyObject_GetAttr(context, s_parent), *level = NULL, *op = NULL, *site = NULL, *seq = NULL;
    Place place = {.phase = Py_NewRef(s_backward)};
    if (parent != NULL)
        place.above = parent == Py_None ? Py_NewRef(Py_None) : backward_in(q, parent, task);
    if (place.above != NULL && (place.scope = PyObject_GetAttr(context, s_scope)) != NULL &&
        (level = PyObject_GetAttr(kind, s_level)) != NULL && (op = PyObject_GetAttr(kind, s_op)) != NULL &&
        (site = PyObject_GetAttr(of, s_site)) != NULL && (seq = PyObject_GetAttr(of, s_seq)) != NULL &&
        PyObject_SetAttr(context, s_task, task) == 0)
        begun = begin_call(q, level, &place, op, site, seq);
    if (begun != NULL && PyObject_SetAttr(context, s_backward, begun))
        Py_CLEAR(begun);
    place_clear(&place);
    Py_XDECREF(of);
    Py_XDECREF(kind);
    Py_XDECREF(parent);
    Py_XDECREF(level);
    Py_XDECREF(op);
    Py_XDECREF(site);
    Py_XDECREF(seq);
    return begun;
}

static PyObject *backward_in(const Quick *q, PyObject *context, PyObject *task)
{
    PyObject *begun = PyObject_GetAttr(context, s_backward), *of = begun == NULL ? NULL : PyObject_GetAttr(context, s_task);
    int same = of == NULL ? -1 : begun == Py_None ? 0 : PyObject_RichCompareBool(of, task, Py_EQ);
    if (same <= 0)
        Py_CLEAR(begun);
    if (same == 0)
        begun = begin_backward(q, context, task);
    Py_XDECREF(of);
    return begun;
}

/* The backward call of a context in the running graph task. */
PyObject *backward_of(const Quick *q, PyObject *context)
{
    PyObject *task = PyObject_CallObject(q->graph_task, NULL), *begun = task == NULL ? NULL : backward_in(q, context, task);
    Py_XDECREF(task);
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

typedef struct {
    const Hook *hook;
    PyObject *gradients;
} Delivery;

static int deliver(const Quick *q, void *data)
{
    const Delivery *d = data;
    return record_gradients(q, d->hook, d->gradients);
}

static int observed(const Quick *q, const Hook *hook, PyObject *gradients)
{
    Delivery d = {hook, gradients};
    PyObject *state = PyObject_GetAttr(q->threads, s_state), *of = state == NULL ? NULL : PyObject_GetAttr(hook->context, s_call);
    PyObject *kind = of == NULL ? NULL : PyObject_GetAttr(of, s_kind), *op = kind == NULL ? NULL : PyObject_GetAttr(kind, s_op);
    int bad = op == NULL ? -1 : guarded(q, state, op, deliver, &d);
    Py_XDECREF(state);
    Py_XDECREF(of);
    Py_XDECREF(kind);
    Py_XDECREF(op);
    return bad < 0 ? -1 : 0;
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
    {Py_tp_doc, "Records the gradients that enter or leave a call; see trueup.recording.adapters.torch.gradients."},
    {Py_tp_call, hook_call},
    {Py_tp_dealloc, hook_dealloc},
    {0, NULL},
};

/* Not seen by the garbage collector, which would look at thousands of them: a context knows nothing of hooks. */
static PyType_Spec HOOK_SPEC = {"trueup.recording.adapters.torch._quick.Hook", sizeof(Hook), 0, Py_TPFLAGS_DEFAULT, HOOK_SLOTS};
static PyObject *hook_type;

static PyObject *new_hook(const Quick *q, PyObject *context, PyObject *slots, int received)
{
    Hook *hook = (Hook *)PyType_GenericAlloc((PyTypeObject *)hook_type, 0);
    if (hook == NULL)
        return NULL;
    hook->quick = Py_NewRef((PyObject *)q);
    hook->context = Py_NewRef(context);
    hook->slots = Py_NewRef(slots);
    hook->received = received;
    return (PyObject *)hook;
}

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
    return new_hook((Quick *)self, args[0], args[1], PyObject_IsTrue(args[2]));
}

void edges_clear(Edges *edges)
{
    Py_CLEAR(edges->first);
    Py_CLEAR(edges->slots);
    Py_CLEAR(edges->leaves);
}

int edges_take(const Quick *q, Edges *edges, PyObject *inputs)
{
    PyObject *on = PyObject_CallObject(q->grad_enabled, NULL);
    Py_XDECREF(on); /* True and False live on */
    if (on != Py_True)
        return on == NULL ? -1 : 0;
    edges->first = PyObject_CallObject(q->next_node, NULL);
    edges->slots = PyDict_New();
    edges->leaves = PyDict_New();
    int bad = edges->first == NULL || edges->slots == NULL || edges->leaves == NULL;
    for (Py_ssize_t k = 0; !bad && k < PyList_Size(inputs); k++) {
        PyObject *slot, *tensor;
        bad = pair_at(inputs, k, &slot, &tensor) || note_edge(slot, tensor, edges->slots, edges->leaves);
    }
    return bad ? -1 : 0;
}

/* Put an output under its node in `nodes`, unless it is an input: 0, or -1 with an exception set. */
static int add_output(const Edges *edges, PyObject *nodes, PyObject *slot, PyObject *tensor)
{
    PyObject *node = PyObject_GetAttr(tensor, s_grad_fn), *number = NULL, *edge = NULL, *held = NULL, *name = NULL, *item = NULL;
    int bad = node == NULL;
    if (!bad && node != Py_None) {
        bad = (number = PyObject_GetAttr(tensor, s_output_nr)) == NULL || (edge = PyTuple_Pack(2, node, number)) == NULL;
        int passed = bad || PyDict_GetItemWithError(edges->slots, edge) != NULL;
        bad = bad || PyErr_Occurred();
        if (!bad && !passed) {
            held = PyDict_GetItemWithError(nodes, node);
            Py_XINCREF(held);
            if (held == NULL && !PyErr_Occurred() && (held = PyList_New(0)) != NULL && PyDict_SetItem(nodes, node, held))
                Py_CLEAR(held);
            name = held == NULL ? NULL : PyUnicode_FromFormat("grad_%U", slot);
            item = name == NULL ? NULL : PyTuple_Pack(2, number, name);
            bad = item == NULL || PyList_Append(held, item);
        }
    }
    Py_XDECREF(node);
    Py_XDECREF(number);
    Py_XDECREF(edge);
    Py_XDECREF(held);
    Py_XDECREF(name);
    Py_XDECREF(item);
    return bad ? -1 : 0;
}

static int put_hook(const Quick *q, PyObject *node, PyObject *method, PyObject *context, PyObject *slots, int received)
{
    PyObject *hook = new_hook(q, context, slots, received), *handle = NULL;
    if (hook != NULL)
        handle = PyObject_CallMethodObjArgs(node, method, hook, NULL);
    Py_XDECREF(hook);
    Py_XDECREF(handle);
    return handle == NULL ? -1 : 0;
}

/* Whether a gradient comes in parts, from several nodes or twice from one (x * x), and has to be added up: 1, 0, or -1 with an
   exception set. */
static int repeats(PyObject *boundary)
{
    PyObject *names, *node, *slots;
    Py_ssize_t at = 0, count = 0;
    while (PyDict_Next(boundary, &at, &node, &slots))
        count += PyList_Size(slots);
    if (count < 2) /* of most calls */
        return 0;
    int bad = (names = PySet_New(NULL)) == NULL;
    at = count = 0;
    while (!bad && PyDict_Next(boundary, &at, &node, &slots))
        for (Py_ssize_t k = 0; !bad && k < PyList_Size(slots); k++, count++)
            bad = PySet_Add(names, PyTuple_GetItem(PyList_GetItem(slots, k), 1));
    int found = bad ? -1 : PySet_Size(names) < count;
    Py_XDECREF(names);
    return found;
}

/* Hook the nodes that hold an edge of the call's inputs. */
static int watch_inputs(const Quick *q, const Edges *edges, PyObject *context, PyObject *pending, int records, int own)
{
    PyObject *boundary = boundary_of(context, edges, pending, own), *node, *slots;
    if (boundary == NULL)
        return -1;
    int summed = records ? repeats(boundary) : 0, bad = summed < 0;
    if (records && summed > 0) {
        PyObject *done = PyObject_CallFunctionObjArgs(q->hook_sums, context, boundary, NULL);
        bad = done == NULL;
        Py_XDECREF(done);
    }
    Py_ssize_t at = 0;
    while (records && summed == 0 && !bad && PyDict_Next(boundary, &at, &node, &slots))
        bad = put_hook(q, node, s_register_hook, context, slots, 0);
    Py_DECREF(boundary);
    return bad ? -1 : 0;
}

int watch(const Quick *q, const Edges *edges, PyObject *context, PyObject *outputs, int records, int own)
{
    if (edges->first == NULL) /* gradients are off */
        return 0;
    PyObject *nodes = PyDict_New(), *pending = PyList_New(0), *node, *slots;
    int bad = nodes == NULL || pending == NULL;
    for (Py_ssize_t k = 0; !bad && k < PyList_Size(outputs); k++) {
        PyObject *slot, *tensor;
        bad = pair_at(outputs, k, &slot, &tensor) || add_output(edges, nodes, slot, tensor);
    }
    Py_ssize_t at = 0;
    while (!bad && PyDict_Next(nodes, &at, &node, &slots)) {
        int mine = own ? tag(node, context) : 1;
        bad = mine < 0 || (mine && PyList_Append(pending, node)) ||
              (records && put_hook(q, node, s_register_prehook, context, slots, 1));
    }
    if (!bad && PyList_Size(pending))
        bad = watch_inputs(q, edges, context, pending, records, own);
    Py_XDECREF(nodes);
    Py_XDECREF(pending);
    return bad ? -1 : 0;
}

int gradients_init(void) { return hook_type != NULL || (hook_type = PyType_FromSpec(&HOOK_SPEC)) != NULL ? 0 : -1; }
