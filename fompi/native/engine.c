/* The good case of a call in C: the loop of dispatch.py, in_flight.py and engine.py, without the GIL.
 *
 * docs/inside/native.md names the Python line that each rule here equals. Everything else is Python's: at any point
 * `export` gives the counters, times and requests of a call, and `fompi.runtime.native_run` goes on from there.
 *
 * A call that `run` does not finish is in flight: `Library.poll`, and each `run` and `drive` of another call, go on with
 * it. Who calls any of these functions holds the engine's lock of Python.
 *
 * There is no mpi.h. Functions of MPI are addresses, handles are `intptr_t` (an int of MPICH, a pointer of Open MPI), a
 * request has `request_nbytes` bytes, and a status is memory of STATUS_NBYTES that nobody reads.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>
#include <time.h>

#include "kernels.h"

#define STATUS_NBYTES 64
#define MOST_REQUEST_NBYTES 16

enum { SEND, RECV, KERNEL, CHECK };       /* kinds of ops; a CHECK goes on if two chunks are equal */
enum { SYNCHRONOUS = 1, TESTED = 2, ABSOLUTE = 4 }; /* Issend; tested at once; `number` is the tag itself */
enum { FINISHED, GOES_ON, STALLED, FAILED, DISAGREES }; /* the state of a call */
enum { NOTHING, MOVED, ENDED }; /* what `Library.poll` returns */

typedef intptr_t Handle;
typedef struct Call Call;

typedef struct { /* the dtype `OP` of fompi.runtime.lower */
    int32_t kind, kernel, flags, peer, number, divisor; /* flags of a kernel: its operands that are float32 */
    int32_t buffers[3]; /* of a message: the first. Of a kernel: two operands (or one) and the result */
    int32_t dtype;
    int64_t offsets[3]; /* in bytes */
    int64_t count;      /* bytes of a message, elements of a kernel */
} Op;

typedef struct {
    PyObject_HEAD
    int (*isend)(const void *, int, Handle, int, int, Handle, void *);
    int (*issend)(const void *, int, Handle, int, int, Handle, void *);
    int (*irecv)(void *, int, Handle, int, int, Handle, void *);
    int (*test)(void *, int *, void *);
    int (*testsome)(int, void *, int *, int *, void *);
    Handle byte;
    Py_ssize_t request_nbytes;
    Call *in_flight; /* the calls in flight, in the order in which they began */
    int has_ended;   /* some of them have ended, and `Library.poll` has not told */
} Library;

struct Call {
    PyObject_HEAD
    Library *library;
    Call *next, *previous; /* in flight */
    int is_in_flight;
    int32_t n_ops, n_first, n_messages, n_buffers, is_small, spins;
    Op *ops;
    int32_t *start_at, *start_to, *done_at, *done_to; /* op i frees start_to[start_at[i] .. start_at[i + 1]] at its start */
    int32_t *blockers_at_first, *first;
    int64_t *nbytes; /* of the buffers */
    char **bases;
    int32_t *given, n_given, n_stamped, stamped_every; /* `forms`: what `begin` writes */
    Handle comm;
    /* the call in flight */
    int32_t tag, unfinished, head, tail, n_ready, n_pending, is_driven;
    int32_t *blockers, *queue, *ready, *owners, *indices, *finished;
    char *requests, *statuses;
    double *begun, *ended, started, moved_at;
    int error, disagrees;
};

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ------------------------------------------------------------------------------------------------ one op */

static char *at(const Call *c, const Op *o, int k) { return c->bases[o->buffers[k]] + o->offsets[k]; }

static void run_kernel(Call *c, const Op *o) {
    if (o->count) kernel_run(o->kernel, o->dtype, o->divisor, o->flags, at(c, o, 0), at(c, o, 1), at(c, o, 2), o->count);
}

static void release(Call *c, const int32_t *from, const int32_t *to, int32_t i) {
    for (int32_t e = from[i]; e < from[i + 1]; e++)
        if (--c->blockers[to[e]] == 0) c->queue[c->tail++] = to[e];
}

static void complete(Call *c, int32_t i) {
    c->ended[i] = c->moved_at = now();
    c->unfinished--;
    release(c, c->done_at, c->done_to, i);
}

/* Starts a message. 0: MPI has failed, and the op has not begun. */
static int start_message(Call *c, int32_t i) {
    const Op *o = &c->ops[i];
    Library *mpi = c->library;
    char *request = c->requests + c->n_pending * mpi->request_nbytes;
    int done = 0, status = 0, number = o->flags & ABSOLUTE ? o->number : c->tag + o->number;
    c->begun[i] = now();
    if (!o->count) {
        complete(c, i); /* no rows, so no message: both ranks know this */
        return 1;
    }
    if (o->kind == RECV) {
        status = mpi->irecv(at(c, o, 0), (int)o->count, mpi->byte, o->peer, number, c->comm, request);
    } else {
        status = (o->flags & SYNCHRONOUS ? mpi->issend : mpi->isend)(
            at(c, o, 0), (int)o->count, mpi->byte, o->peer, number, c->comm, request);
    }
    if (status) {
        c->begun[i] = 0.0;
        c->error = status;
        return 0;
    }
    if (o->kind == SEND && o->flags & TESTED) status = mpi->test(request, &done, c->statuses);
    if (done) {
        complete(c, i);
    } else {
        c->owners[c->n_pending++] = i;
        c->error = status;
    }
    return !status;
}

static void kernel_ready(Call *c, int32_t i) { /* descending: the first op of the program is the last */
    int32_t n = c->n_ready++;
    for (; n > 0 && c->ready[n - 1] < i; n--) c->ready[n] = c->ready[n - 1];
    c->ready[n] = i;
}

static void start_ops(Call *c) {
    while (c->head < c->tail && !c->error && !c->disagrees) {
        int32_t i = c->queue[c->head];
        const Op *o = &c->ops[i];
        if (o->kind == KERNEL && !c->is_small) {
            c->head++;
            kernel_ready(c, i);
            continue;
        }
        if (o->kind == CHECK && memcmp(at(c, o, 0), at(c, o, 1), (size_t)o->count)) {
            c->disagrees = 1;
            return;
        }
        if (o->kind == KERNEL || o->kind == CHECK) {
            c->begun[i] = now();
            if (o->kind == KERNEL) run_kernel(c, o);
            complete(c, i);
        } else if (!start_message(c, i)) {
            if (!c->begun[i]) return;
        }
        c->head++;
        release(c, c->start_at, c->start_to, i);
    }
}

/* ------------------------------------------------------------------------------------------------ progress */

static void forget(Call *c, int32_t k) { /* the last request moves to the free place */
    Py_ssize_t size = c->library->request_nbytes;
    c->n_pending--;
    if (k < c->n_pending) {
        memcpy(c->requests + k * size, c->requests + c->n_pending * size, size);
        c->owners[k] = c->owners[c->n_pending];
    }
}

static int poll(Call *c) {
    int n = 0;
    if (!c->n_pending) return 0;
    if (c->n_pending == 1) {
        c->error = c->library->test(c->requests, &n, c->statuses);
        c->indices[0] = 0;
    } else {
        c->error = c->library->testsome(c->n_pending, c->requests, &n, c->indices, c->statuses);
    }
    if (c->error || n <= 0) return 0; /* MPI_UNDEFINED is negative */
    for (int k = 1; k < n; k++) { /* in order, nearly always */
        int32_t v = c->indices[k];
        int j = k;
        for (; j > 0 && c->indices[j - 1] > v; j--) c->indices[j] = c->indices[j - 1];
        c->indices[j] = v;
    }
    for (int k = 0; k < n; k++) c->finished[k] = c->owners[c->indices[k]];
    for (int k = n - 1; k >= 0; k--) forget(c, c->indices[k]);
    for (int k = 0; k < n; k++) complete(c, c->finished[k]);
    start_ops(c);
    return 1;
}

/* Polls, then runs one kernel. 0: there was nothing to do. */
static int progress(Call *c) {
    int moved = poll(c);
    if (c->n_ready && !c->error) {
        int32_t i = c->ready[--c->n_ready];
        c->begun[i] = now();
        run_kernel(c, &c->ops[i]);
        complete(c, i);
        release(c, c->start_at, c->start_to, i);
        start_ops(c);
        moved = 1;
    }
    return moved;
}

static int state_of(const Call *c) {
    return c->error ? FAILED : c->disagrees ? DISAGREES : c->unfinished ? GOES_ON : FINISHED;
}

static void depart(Call *c) { /* it is in flight from now on */
    Call **last = &c->library->in_flight;
    c->next = c->previous = NULL;
    for (; *last; last = &(*last)->next) c->previous = *last;
    *last = c;
    c->is_in_flight = 1;
}

static void land(Call *c) {
    if (!c->is_in_flight) return;
    if (c->next) c->next->previous = c->previous;
    if (c->previous) c->previous->next = c->next;
    else c->library->in_flight = c->next;
    c->is_in_flight = 0;
}

/* One round of each call in flight but `except`. */
static int go_round(Library *mpi, const Call *except) {
    int moved = 0;
    for (Call *c = mpi->in_flight, *next; c; c = next) {
        next = c->next;
        if (c == except) continue;
        moved |= progress(c);
        if (state_of(c) == GOES_ON) continue;
        land(c);
        mpi->has_ended = 1;
    }
    return moved;
}

/* Drives the call for `seconds`, or until it has made no progress for `stall` seconds. 0 seconds: one round.
 *
 * Other calls in flight go on meanwhile. If the call has not ended, it is in flight.
 */
static int drive(Call *c, double seconds, double stall) {
    double from = now(), t;
    long idle = 0;
    int state;
    while ((state = state_of(c)) == GOES_ON) {
        if (progress(c)) {
            idle = 0;
            if (seconds > 0 && now() - from < seconds) continue;
            state = state_of(c);
            break;
        }
        if ((state = state_of(c)) != GOES_ON || seconds <= 0) break;
        if (c->library->in_flight) go_round(c->library, c);
        if (++idle <= c->spins) continue;
        sched_yield();
        t = now();
        if (t - (c->moved_at > from ? c->moved_at : from) > stall) {
            state = STALLED;
            break;
        }
        if (t - from >= seconds) break;
    }
    if (state == GOES_ON || state == STALLED) {
        if (!c->is_in_flight) depart(c);
    } else {
        land(c);
    }
    return state;
}

/* ------------------------------------------------------------------------------------------------ Library */

static PyObject *library_new(PyTypeObject *type, PyObject *args, PyObject *options) {
    unsigned long long isend, issend, irecv, test, testsome;
    unsigned long long byte;
    Py_ssize_t request_nbytes;
    (void)options;
    if (!PyArg_ParseTuple(args, "KKKKKKn", &isend, &issend, &irecv, &test, &testsome, &byte, &request_nbytes)) return NULL;
    if (!isend || !issend || !irecv || !test || !testsome || request_nbytes < 1 || request_nbytes > MOST_REQUEST_NBYTES) {
        PyErr_SetString(PyExc_ValueError, "a function of MPI has no address, or its requests have an unknown size");
        return NULL;
    }
    allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Library *self = (Library *)make(type, 0);
    if (self == NULL) return NULL;
    self->isend = (int (*)(const void *, int, Handle, int, int, Handle, void *))(uintptr_t)isend;
    self->issend = (int (*)(const void *, int, Handle, int, int, Handle, void *))(uintptr_t)issend;
    self->irecv = (int (*)(void *, int, Handle, int, int, Handle, void *))(uintptr_t)irecv;
    self->test = (int (*)(void *, int *, void *))(uintptr_t)test;
    self->testsome = (int (*)(int, void *, int *, int *, void *))(uintptr_t)testsome;
    self->byte = (Handle)byte;
    self->request_nbytes = request_nbytes;
    return (PyObject *)self;
}

static void plain_free(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc release_memory = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release_memory(self);
    Py_DECREF(type);
}

static PyObject *library_poll(PyObject *self, PyObject *none) {
    Library *mpi = (Library *)self;
    int moved;
    (void)none;
    Py_BEGIN_ALLOW_THREADS
    moved = go_round(mpi, NULL) ? MOVED : NOTHING;
    Py_END_ALLOW_THREADS
    if (mpi->has_ended) moved = ENDED;
    mpi->has_ended = 0;
    return PyLong_FromLong(moved);
}

static PyMethodDef library_methods[] = {
    {"poll", library_poll, METH_NOARGS,
     "One round of each call in flight. 0: nothing has moved; 2: some call has ended (`Call.state`)."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot library_slots[] = {
    {Py_tp_new, library_new},
    {Py_tp_dealloc, plain_free},
    {Py_tp_methods, library_methods},
    {Py_tp_doc, "The functions of an MPI library by address, its MPI_BYTE, and the size of a request."},
    {0, NULL},
};
static PyType_Spec library_spec = {"fompi.native._native.Library", sizeof(Library), 0, Py_TPFLAGS_DEFAULT, library_slots};

/* ------------------------------------------------------------------------------------------------ Call */

static PyObject *library_type, *call_type;

static void *copied(PyObject *from, Py_ssize_t width, int32_t *count) {
    Py_buffer view;
    if (PyObject_GetBuffer(from, &view, PyBUF_SIMPLE) < 0) return NULL;
    void *to = malloc(view.len ? (size_t)view.len : 1);
    if (to == NULL) {
        PyErr_NoMemory();
    } else {
        memcpy(to, view.buf, (size_t)view.len);
        *count = (int32_t)(view.len / width);
    }
    PyBuffer_Release(&view);
    return to;
}

/* True if the lists of op numbers are lists of op numbers. Adds to `blockers` what each op waits for. */
static int are_edges(const int32_t *from, int32_t n_from, const int32_t *to, int32_t n_to, int32_t n, int32_t *blockers) {
    if (n_from != n + 1 || from[0] != 0 || from[n] != n_to) return 0;
    for (int32_t i = 0; i < n; i++)
        if (from[i] > from[i + 1]) return 0;
    for (int32_t e = 0; e < n_to; e++) {
        if (to[e] < 0 || to[e] >= n) return 0;
        blockers[to[e]]++;
    }
    return 1;
}

static int is_inside(const Call *c, const Op *o, int k, int64_t nbytes) {
    return o->buffers[k] >= 0 && o->buffers[k] < c->n_buffers && o->offsets[k] >= 0 && nbytes >= 0 &&
           o->offsets[k] <= c->nbytes[o->buffers[k]] - nbytes;
}

static int is_op(const Call *c, const Op *o) {
    if (o->kind == SEND || o->kind == RECV)
        return o->count >= 0 && o->count <= INT32_MAX && o->number >= 0 && o->peer >= 0 && is_inside(c, o, 0, o->count);
    if (o->kind == CHECK) return o->count >= 0 && is_inside(c, o, 0, o->count) && is_inside(c, o, 1, o->count);
    if (o->kind != KERNEL || o->count < 0 || o->count > INT64_MAX / 16) return 0;
    for (int k = 0; k < 3; k++) {
        int64_t width = kernel_width(o->kernel, o->dtype, o->divisor, o->flags, k);
        if (!width || !is_inside(c, o, k, width * o->count)) return 0;
    }
    return 1;
}

static const char *fault(const Call *c, int32_t n_start, int32_t n_start_to, int32_t n_done, int32_t n_done_to) {
    int32_t n = c->n_ops, first = 0;
    for (int32_t i = 0; i < n; i++)
        if (!is_op(c, &c->ops[i])) return "an op does not stay inside its buffers";
    memset(c->blockers, 0, (size_t)n * sizeof(int32_t));
    if (!are_edges(c->start_at, n_start, c->start_to, n_start_to, n, c->blockers) ||
        !are_edges(c->done_at, n_done, c->done_to, n_done_to, n, c->blockers))
        return "a list of ops names an op that is none";
    for (int32_t i = 0; i < n; i++) {
        if (c->blockers[i] != c->blockers_at_first[i]) return "a counter of blockers is wrong";
        if (c->blockers[i]) continue;
        if (first >= c->n_first || c->first[first++] != i) return "the list of first ops is wrong";
    }
    return first == c->n_first ? NULL : "the list of first ops is wrong";
}

static void call_free(PyObject *object) {
    Call *c = (Call *)object;
    if (c->library) land(c);
    void *all[] = {c->ops, c->start_at, c->start_to, c->done_at, c->done_to, c->blockers_at_first, c->first, c->nbytes,
                   c->bases, c->given, c->blockers, c->queue, c->ready, c->owners, c->indices, c->finished, c->requests,
                   c->statuses, c->begun};
    for (size_t k = 0; k < sizeof all / sizeof *all; k++) free(all[k]);
    Py_XDECREF((PyObject *)c->library);
    plain_free(object);
}

static PyObject *call_new(PyTypeObject *type, PyObject *args, PyObject *options) {
    PyObject *library, *ops, *edges[4], *blockers, *first, *nbytes;
    unsigned long long comm;
    int is_small, spins;
    int32_t counts[4], n_blockers = 0;
    (void)options;
    if (!PyArg_ParseTuple(args, "O!OOOOOOOOKpi", library_type, &library, &ops, &edges[0], &edges[1], &edges[2],
                          &edges[3], &blockers, &first, &nbytes, &comm, &is_small, &spins))
        return NULL;
    allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Call *c = (Call *)make(type, 0);
    if (c == NULL) return NULL;
    Py_INCREF(library);
    c->library = (Library *)library;
    c->comm = (Handle)comm;
    c->is_small = is_small;
    c->spins = spins;
    int32_t **lists[] = {&c->start_at, &c->start_to, &c->done_at, &c->done_to};
    if ((c->ops = copied(ops, sizeof(Op), &c->n_ops)) == NULL) goto failed;
    for (int k = 0; k < 4; k++)
        if ((*lists[k] = copied(edges[k], sizeof(int32_t), &counts[k])) == NULL) goto failed;
    if ((c->blockers_at_first = copied(blockers, sizeof(int32_t), &n_blockers)) == NULL) goto failed;
    if ((c->first = copied(first, sizeof(int32_t), &c->n_first)) == NULL) goto failed;
    if ((c->nbytes = copied(nbytes, sizeof(int64_t), &c->n_buffers)) == NULL) goto failed;
    for (int32_t i = 0; i < c->n_ops; i++) c->n_messages += c->ops[i].kind == SEND || c->ops[i].kind == RECV;
    size_t n = (size_t)c->n_ops + 1, m = (size_t)c->n_messages + 1;
    c->blockers = calloc(n, sizeof(int32_t));
    c->queue = calloc(n, sizeof(int32_t));
    c->ready = calloc(n, sizeof(int32_t));
    c->owners = calloc(m, sizeof(int32_t));
    c->indices = calloc(m, sizeof(int32_t));
    c->finished = calloc(m, sizeof(int32_t));
    c->requests = calloc(m, MOST_REQUEST_NBYTES);
    c->statuses = calloc(m, STATUS_NBYTES);
    c->begun = calloc(2 * n, sizeof(double));
    c->bases = calloc((size_t)c->n_buffers + 1, sizeof(char *));
    if (!c->blockers || !c->queue || !c->ready || !c->owners || !c->indices || !c->finished || !c->requests ||
        !c->statuses || !c->begun || !c->bases) {
        PyErr_NoMemory();
        goto failed;
    }
    c->ended = c->begun + c->n_ops;
    const char *words = n_blockers != c->n_ops ? "each op has one counter" : fault(c, counts[0], counts[1], counts[2], counts[3]);
    if (words == NULL) return (PyObject *)c;
    PyErr_SetString(PyExc_ValueError, words);
failed:
    Py_DECREF((PyObject *)c);
    return NULL;
}

static int refuse_if_driven(const Call *c) {
    if (c->is_driven) PyErr_SetString(PyExc_RuntimeError, "another thread drives this call");
    return c->is_driven;
}

static PyObject *call_place(PyObject *self, PyObject *addresses) {
    Call *c = (Call *)self;
    Py_buffer view;
    if (refuse_if_driven(c) || PyObject_GetBuffer(addresses, &view, PyBUF_SIMPLE) < 0) return NULL;
    int fits = view.len == (Py_ssize_t)(c->n_buffers * sizeof(char *));
    if (fits) memcpy(c->bases, view.buf, (size_t)view.len);
    PyBuffer_Release(&view);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "each buffer has one address");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *driven(Call *c, double seconds, double stall) {
    int state;
    c->is_driven = 1;
    Py_BEGIN_ALLOW_THREADS
    start_ops(c);
    state = drive(c, seconds, stall);
    Py_END_ALLOW_THREADS
    c->is_driven = 0;
    return PyLong_FromLong(state);
}

static int refuse_if_unfinished(const Call *c) {
    int is_unfinished = c->is_in_flight || c->unfinished;
    if (is_unfinished) PyErr_SetString(PyExc_RuntimeError, "the last call is not finished");
    return is_unfinished || refuse_if_driven(c);
}

static PyObject *begun(Call *c, int tag, double seconds, double stall) {
    memcpy(c->blockers, c->blockers_at_first, (size_t)c->n_ops * sizeof(int32_t));
    memcpy(c->queue, c->first, (size_t)c->n_first * sizeof(int32_t));
    memset(c->begun, 0, 2 * (size_t)c->n_ops * sizeof(double));
    c->head = c->n_ready = c->n_pending = c->error = c->disagrees = 0;
    c->tail = c->n_first;
    c->unfinished = c->n_ops;
    c->tag = tag;
    c->started = c->moved_at = now();
    return driven(c, seconds, stall);
}

static PyObject *call_run(PyObject *self, PyObject *args) {
    Call *c = (Call *)self;
    double seconds, stall;
    int tag;
    if (!PyArg_ParseTuple(args, "idd", &tag, &seconds, &stall) || refuse_if_unfinished(c)) return NULL;
    return begun(c, tag, seconds, stall);
}

/* Which buffers `run_on` places, and how many of the last buffers have a stamp, one in every so many bytes. */
static PyObject *call_form(PyObject *self, PyObject *args) {
    Call *c = (Call *)self;
    PyObject *given;
    int32_t *numbers, n;
    int n_stamped, every;
    if (!PyArg_ParseTuple(args, "Oii", &given, &n_stamped, &every) || refuse_if_unfinished(c)) return NULL;
    if ((numbers = copied(given, sizeof(int32_t), &n)) == NULL) return NULL;
    int is_right = n_stamped >= 0 && n_stamped <= c->n_buffers && every >= (int)sizeof(int64_t);
    for (int32_t k = 0; k < n; k++) is_right &= numbers[k] >= 0 && numbers[k] < c->n_buffers;
    for (int k = 1; is_right && k <= n_stamped; k++) is_right = c->nbytes[c->n_buffers - k] % every == 0;
    if (!is_right) {
        free(numbers);
        PyErr_SetString(PyExc_ValueError, "there is no such buffer");
        return NULL;
    }
    free(c->given);
    c->given = numbers;
    c->n_given = n;
    c->n_stamped = n_stamped;
    c->stamped_every = every;
    Py_RETURN_NONE;
}

static PyObject *call_run_on(PyObject *self, PyObject *args) {
    Call *c = (Call *)self;
    PyObject *addresses;
    double seconds, stall;
    long long stamp;
    int tag;
    if (!PyArg_ParseTuple(args, "iddLO!", &tag, &seconds, &stall, &stamp, &PyTuple_Type, &addresses)) return NULL;
    if (refuse_if_unfinished(c)) return NULL;
    if (PyTuple_Size(addresses) != c->n_given) {
        PyErr_SetString(PyExc_ValueError, "each given buffer has one address");
        return NULL;
    }
    for (int32_t k = 0; k < c->n_given; k++) {
        c->bases[c->given[k]] = (char *)PyLong_AsVoidPtr(PyTuple_GetItem(addresses, k));
        if (PyErr_Occurred()) return NULL;
    }
    for (int k = 1; k <= c->n_stamped; k++)
        for (int64_t at = 0; at < c->nbytes[c->n_buffers - k]; at += c->stamped_every)
            memcpy(c->bases[c->n_buffers - k] + at, &stamp, sizeof(int64_t));
    return begun(c, tag, seconds, stall);
}

static PyObject *call_drive(PyObject *self, PyObject *args) {
    Call *c = (Call *)self;
    double seconds, stall;
    if (!PyArg_ParseTuple(args, "dd", &seconds, &stall) || refuse_if_driven(c)) return NULL;
    return driven(c, seconds, stall);
}

static PyObject *call_has_ended(PyObject *self, PyObject *number) {
    Call *c = (Call *)self;
    long i = PyLong_AsLong(number);
    if (i == -1 && PyErr_Occurred()) return NULL;
    if (i < 0 || i >= c->n_ops) {
        PyErr_SetString(PyExc_IndexError, "there is no such op");
        return NULL;
    }
    return PyBool_FromLong(c->ended[i] != 0.0);
}

static PyObject *call_state(PyObject *self, void *none) {
    (void)none;
    return PyLong_FromLong(state_of((Call *)self));
}

static PyObject *call_times(PyObject *self, PyObject *none) {
    Call *c = (Call *)self;
    (void)none;
    return PyBytes_FromStringAndSize((char *)c->begun, (Py_ssize_t)(2 * (size_t)c->n_ops * sizeof(double)));
}

static PyObject *call_export(PyObject *self, PyObject *none) {
    Call *c = (Call *)self;
    Py_ssize_t size = c->library->request_nbytes;
    (void)none;
    if (refuse_if_driven(c)) return NULL;
    PyObject *requests = PyList_New(c->n_pending);
    if (requests == NULL) return NULL;
    for (int32_t k = 0; k < c->n_pending; k++) {
        int64_t wide = 0;
        int32_t narrow = 0;
        memcpy(size == 4 ? (void *)&narrow : (void *)&wide, c->requests + k * size, size == 4 ? 4 : 8);
        /* as mpi4py writes handles: those of 4 bytes with their sign */
        PyObject *pair = Py_BuildValue("Ki", (unsigned long long)(size == 4 ? narrow : wide), (int)c->owners[k]);
        if (pair == NULL || PyList_SetItem(requests, k, pair) < 0) {
            Py_DECREF(requests);
            return NULL;
        }
    }
    land(c);
    c->n_pending = c->unfinished = 0;
    return Py_BuildValue("y#NN", (char *)c->blockers, (Py_ssize_t)((size_t)c->n_ops * sizeof(int32_t)),
                         call_times(self, NULL), requests);
}

static PyMethodDef call_methods[] = {
    {"place", call_place, METH_O, "place(addresses): where the buffers are, 64 bits each."},
    {"run", call_run, METH_VARARGS, "run(tag, seconds, stall): begin a call, and drive it. If it has not ended then, it is in flight."},
    {"has_ended", call_has_ended, METH_O, "has_ended(op): True once this op is done."},
    {"form", call_form, METH_VARARGS, "form(given, n, nbytes): `run_on` places the buffers of these numbers, and writes "
                                      "the stamp to every so many bytes of the last n buffers."},
    {"run_on", call_run_on, METH_VARARGS, "run_on(tag, seconds, stall, stamp, addresses): `run` on other memory."},
    {"drive", call_drive, METH_VARARGS, "drive(seconds, stall): go on with the call. 0 seconds: one round."},
    {"times", call_times, METH_NOARGS, "When each op began, then when each op ended, as doubles of perf_counter."},
    {"export", call_export, METH_NOARGS, "(blockers, times, [(request, op)]): C goes on with this call no more."},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef call_members[] = {
    {"started", T_DOUBLE, offsetof(Call, started), READONLY, "when the last call began"},
    {"moved_at", T_DOUBLE, offsetof(Call, moved_at), READONLY, "when it last made progress"},
    {"unfinished", T_INT, offsetof(Call, unfinished), READONLY, "how many ops are not done"},
    {"disagrees", T_INT, offsetof(Call, disagrees), READONLY, "1 if a CHECK has found a difference"},
    {"error", T_INT, offsetof(Call, error), READONLY, "the error code of MPI, or 0"},
    {NULL, 0, 0, 0, NULL},
};
static PyGetSetDef call_getset[] = {
    {"state", call_state, NULL, "0: finished; 1: it goes on; 3: MPI has failed; 4: a CHECK has found a difference", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot call_slots[] = {
    {Py_tp_new, call_new},
    {Py_tp_dealloc, call_free},
    {Py_tp_methods, call_methods},
    {Py_tp_members, call_members},
    {Py_tp_getset, call_getset},
    {Py_tp_doc, "A plan of one rank as a table of ops: Call(library, ops, start_at, start_to, done_at, done_to, blockers, "
                "first, nbytes of the buffers, communicator, is_small, spins)."},
    {0, NULL},
};
static PyType_Spec call_spec = {"fompi.native._native.Call", sizeof(Call), 0, Py_TPFLAGS_DEFAULT, call_slots};

/* ------------------------------------------------------------------------------------------------ the module */

/* The caller vouches for the addresses. */
static PyObject *run_one_kernel(PyObject *self, PyObject *args) {
    int kernel, dtype, divisor, flags;
    unsigned long long a, b, c;
    long long count;
    (void)self;
    if (!PyArg_ParseTuple(args, "iiiiKKKL", &kernel, &dtype, &divisor, &flags, &a, &b, &c, &count)) return NULL;
    if (!kernel_width(kernel, dtype, divisor, flags, 0)) {
        PyErr_SetString(PyExc_ValueError, "there is no such kernel");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    if (count > 0) kernel_run(kernel, dtype, divisor, flags, (char *)(uintptr_t)a, (char *)(uintptr_t)b, (char *)(uintptr_t)c, count);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"kernel", run_one_kernel, METH_VARARGS, "kernel(kernel, dtype, divisor, flags, a, b, c, count): one kernel on memory at these addresses."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "fompi.native._native", "Calls in C.", -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *made = PyModule_Create(&module);
    if (made == NULL) return NULL;
    library_type = PyType_FromSpec(&library_spec);
    call_type = PyType_FromSpec(&call_spec);
    if (library_type == NULL || call_type == NULL || PyModule_AddObjectRef(made, "Library", library_type) < 0 ||
        PyModule_AddObjectRef(made, "Call", call_type) < 0 ||
        PyModule_AddIntConstant(made, "OP_NBYTES", (long)sizeof(Op)) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
