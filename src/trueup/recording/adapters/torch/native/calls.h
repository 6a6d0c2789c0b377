/* What the short ways of functions, operators and modules share: where a call stands, its number, its edges and its hooks. */
#ifndef TRUEUP_CALLS_H
#define TRUEUP_CALLS_H

#include "quick.h"

/* calls.c. New references; NULL or -1 with an exception set. */
int sees(const Quick *q, PyObject *state);                        /* whether what executes now is recorded: 1 or 0; see Session.sees */
PyObject *last_of(PyObject *owner, PyObject *name);               /* the top of a list that is an attribute, or None */
int is_recorded(PyObject *call);                                  /* whether the options keep it */
int link_runs(const Quick *q, PyObject *state, PyObject *call);   /* list it in the runs of checkpointed functions; see replays.link */
int push(PyObject *owner, PyObject *name, PyObject *item);        /* onto a list that is an attribute */
void pop(PyObject *owner, PyObject *name);                        /* whatever exception is set */
int long_of(PyObject *owner, PyObject *name, long *value);        /* an integer attribute */
int running_task(const Quick *q, PyObject **task, long *number);  /* the autograd graph task that runs, -1 for none */

typedef struct {
    PyObject *phase, *scope, *above, *parent; /* above: the call around it or None; parent: its context or None */
} Place;
/* 1 found; 2 in a backward pass, inside nothing that is part of it; 0 for the long way. */
int place_of(const Quick *q, PyObject *state, long task, Place *place);
void place_clear(Place *place);

PyObject *begin_call(const Quick *q, PyObject *level, const Place *place, PyObject *op, PyObject *site, PyObject *forward_seq);
PyObject *context_of(const Quick *q, PyObject *call, PyObject *parent, PyObject *scope, PyObject *task);
/* values.c: the row of other arguments, if any; `func` where how it was called is described, too, else NULL */
int add_values(const Quick *q, PyObject *of, PyObject *func, PyObject *args, PyObject *kwargs);
PyObject *frozen_value(const Quick *q, PyObject *value); /* hashable, equal for values that are encoded alike; NULL: nothing so simple */
/* invocations.c */
PyObject *described_exactly(const Quick *q, PyObject *of, PyObject *func, PyObject *args, PyObject *kwargs);

/* records.c */
PyObject *new_call(PyObject *seq, PyObject *kind, PyObject *ordinal, PyObject *parent, PyObject *site, PyObject *forward_seq);
PyObject *new_statistics(PyObject *values, PyObject *digest);

PyObject *site_of(const Quick *q, PyObject *state);                             /* sites.c: the number of the call stack, or None */

/* observing.c: run work behind the wall: 0, 1 where it failed and the training goes on, -1 with an exception set. */
int guarded(const Quick *q, PyObject *state, PyObject *what, int (*work)(const Quick *q, void *data), void *data);
int survive(const Quick *q, PyObject *what);

/* gradients.c */
typedef struct {
    PyObject *first, *slots, *leaves;
} Edges;
int edges_take(const Quick *q, Edges *edges, PyObject *inputs); /* nothing where gradients are off */
void edges_clear(Edges *edges);
int watch(const Quick *q, const Edges *edges, PyObject *context, PyObject *outputs, int records, int own);
PyObject *backward_of(const Quick *q, PyObject *context); /* the backward call of a context in the running graph task */

/* graph.c */
int note_edge(PyObject *slot, PyObject *tensor, PyObject *slots, PyObject *leaves);
int tag(PyObject *node, PyObject *context);
PyObject *boundary_of(PyObject *context, const Edges *edges, PyObject *pending, int own);

/* walk.c */
PyObject *tensors_in(PyObject *prefix, PyObject *value, PyObject *kwargs);
int is_tensor(PyObject *value);

/* rows.c: of a list of (slot, tensor) */
int record_inputs(const Quick *q, PyObject *of, PyObject *tensors, PyObject *level);
int record_outputs(const Quick *q, PyObject *of, PyObject *tensors, PyObject *inputs, PyObject *step);
int note_produced(const Quick *q, PyObject *of, PyObject *tensors, PyObject *level);
int note_written(const Quick *q, PyObject *tensor);
int is_plain(const Quick *q, PyObject *tensor);
int is_dense(const Quick *q, PyObject *tensor);  /* a plain tensor whose memory holds its elements as they are, of a known layout */
int is_transformed(const Quick *q);              /* whether `torch.func` transforms run: 1, 0, or -1 with an exception set */

#endif
