/* What the files of the short way share: the object that works for a session, and how it looks at Python objects. */
#ifndef TRUEUP_QUICK_H
#define TRUEUP_QUICK_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../../../../foundation/kernels/native/entrance.h"

/* Names of attributes, as interned strings: s_shape is "shape". */
#define NAMES(X) \
    X(__enter__) X(__exit__) X(__name__) X(_add) X(_buffers) X(_closed) X(_is_compiling_flag) X(_judge) X(_last) X(_new) \
    X(_new_kind) X(_parameters) X(_rows) X(_sequence_nr) X(_version) X(active) X(added) X(api) X(aten) X(backward) X(busy) \
    X(call) X(complex) X(contexts) X(data_ptr) X(device) X(device_name) X(dtype) X(f_back) X(f_lasti) \
    X(failed) X(failure) X(forget) X(forward) X(forward_seq) X(grad_fn) X(graph_task) X(host_kind) X(input) X(is_neg) X(kind) \
    X(known) X(last) X(level) X(metadata) X(module) X(modules) X(name) X(next_functions) X(observed) X(op) X(ordinals) X(out) X(output) \
    X(output_nr) X(param) X(parent) X(passes_optimizer) X(path) X(phase) X(produced) X(producer) X(producers) X(readable) X(reads) \
    X(recorded) X(register_hook) X(register_prehook) X(requires_grad) X(running) X(runs) X(scope) X(seq) X(shape) X(site) \
    X(slots) X(start) X(state) X(step) X(stepping) X(stop) X(stop_if_asked) X(storage_offset) X(stride) X(task) X(trueup) \
    X(uninitialised) X(untyped_storage) X(variable) X(version) X(view) X(written)
#define DECLARE(name) extern PyObject *s_##name;
NAMES(DECLARE)

/* Objects that a `Quick` works on, by the names its constructor knows them. */
#define HELD(X) \
    X(session) X(threads) X(recorder) X(buffers) X(slot_at_length) X(storage_at_length) X(in_flight) X(storages) X(devices) \
    X(layouts) X(tensor) X(parameter) X(transforms) X(count_threads) X(graph_task) X(no_overrides) X(kinds) \
    X(seqs) X(context_type) X(sites) X(codes) X(known_sites) X(values) X(describe_values) X(arguments) \
    X(simple_types) X(size_type) X(tracing) X(compiler) X(phase_of) X(running_owner) X(link) X(scopes) X(grad_enabled) \
    X(next_node) X(no_task) X(invocation) X(output_buffer) X(producing) X(own_names) X(usual) X(is_usual) X(function_modes) X(hook_sums) \
    X(autocast) X(invocations) X(generator_state)

/* Those that functions, operators and modules bring with them; see `teach`. */
#define TAUGHT(X) \
    X(names) X(function_at_length) X(begin_function) X(buffers_written) X(add_buffers) X(operators) X(operator_at_length) \
    X(begin_operator) X(run_module) X(execute_module) X(module_at_length) X(begin_module) X(parameters_of) X(buffers_of)
#define MEMBER(name) PyObject *name;

typedef struct {
    PyObject_HEAD
    HELD(MEMBER)
    TAUGHT(MEMBER)
    TrueupEntrance kernel;
    Py_ssize_t most_values; /* entries of `values` */
    int digest_only, keeps_bytes, sees_writes;
    int has_module, has_api, has_aten; /* levels that are recorded */
    int only_modules, follows;         /* whether modules are the producers; whether functions are, among others */
} Quick;

static inline PyObject *call(PyObject *object, PyObject *name) { return PyObject_CallMethodObjArgs(object, name, NULL); }

/* Take a pair out of a list: 0, or -1 with an exception set. What is taken is borrowed from the list. */
static inline int pair_at(PyObject *list, Py_ssize_t k, PyObject **first, PyObject **second)
{
    PyObject *pair = PyList_GetItem(list, k);
    if (pair == NULL || !PyTuple_Check(pair) || PyTuple_Size(pair) != 2) {
        PyErr_SetString(PyExc_TypeError, "expected a list of pairs");
        return -1;
    }
    *first = PyTuple_GetItem(pair, 0);
    *second = PyTuple_GetItem(pair, 1);
    return 0;
}

/* observing.c: nothing that executes behind the wall is a call, and no override of functions applies. Of a thread's `state`. */
typedef struct {
    PyObject *state, *before, *plain;
} Wall;
int wall_raise(const Quick *q, Wall *wall); /* 0, or -1 with an exception set */
int wall_lower(const Wall *wall);
void wall_clear(Wall *wall);

/* rows.c */
int is_true(PyObject *object, PyObject *name);                  /* of an attribute: 1, 0, or -1 with an exception set */
PyObject *storage_of(const Quick *q, PyObject *tensor);         /* what is known of a tensor's storage, or None */
PyObject *producer_of(PyObject *storage, PyObject *level);      /* the call and slot that last wrote it, or None */
int set_producer(const Quick *q, PyObject *tensor, PyObject *storage, PyObject *level, PyObject *of, PyObject *name);
int add_row(const Quick *q, PyObject *of, PyObject *slot, PyObject *value, PyObject *producer, PyObject *stats, PyObject *step);
int record_at_length(const Quick *q, PyObject *of, PyObject *name, PyObject *tensor, PyObject *storage, PyObject *producer,
                     PyObject *step);                           /* add a row, whichever way: 0, or -1 with an exception set */

/* Methods of Quick, and the types that some of them make. */
PyObject *quick_storage(PyObject *self, PyObject *tensor);
PyObject *quick_slot(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *quick_inputs(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *quick_outputs(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *quick_produced(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *quick_hook(PyObject *self, PyObject *const *args, Py_ssize_t count); /* gradients.c */
int gradients_init(void);
PyObject *quick_function(PyObject *self, PyObject *const *args, Py_ssize_t count); /* api.c */
PyObject *quick_operator(PyObject *self, PyObject *const *args, Py_ssize_t count); /* aten.c */
PyObject *quick_module(PyObject *self, PyObject *const *args, Py_ssize_t count);   /* nn.c */
PyObject *quick_observing(PyObject *self, PyObject *const *args, Py_ssize_t count); /* observing.c */
int observing_init(void);
int records_init(void); /* records.c */

#endif
