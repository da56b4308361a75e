/* Messages by UCX, as MPI has them: the five functions that engine.c calls, and the type `Worker` for Python.
 *
 * There is no ucp.h. The layouts here are those of UCX 1.x, which only ever adds fields behind the ones that a mask names.
 * Python finds the library and passes the addresses of its functions.
 *
 * A message has a tag of 64 bits: the group (22 bits), the sender (14) and the tag of the program (28). A group is a number
 * that all its members know, and their endpoints in the order of their ranks. The sender is the number by which the
 * receiver counts it among its peers, so two groups of a process may have the same number if no other process is in both.
 * No group has the last number: by it processes meet that have no group yet (`tell`, `heard`).
 *
 * Over a long distance one connection of TCP does not fill the pipe. So a worker here is one or several of UCX, each with a
 * connection to each peer, and the tag of a message says which of them carries it.
 *
 * What is sent to a lost peer is done at once, and what it should have sent never comes: the engine of Python asks `losses`
 * and `error`, and ends the calls that wait for it. `Worker.lock` guards everything: a worker takes one thread at a time.
 */
#include "ucx.h"

#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>

#define TAG_BITS 28
#define SENDER_BITS 14
#define ALL_BITS (~0ull)
#define ANY_SENDER (ALL_BITS ^ (((1ull << SENDER_BITS) - 1) << TAG_BITS))
#define ANY_OF_GROUP (ALL_BITS << (TAG_BITS + SENDER_BITS))
#define MEETING ANY_OF_GROUP

enum { IN_PROGRESS = 1, TRUNCATED = -9, CANCELED = -16, LAST_ERROR = -100 };
enum { MOST_ROUNDS = 100000, MOST_WORDS = 4096, MOST_LANES = 16 };

typedef struct {
    uint64_t mask, features;
    char more[120];
} ContextParams;
typedef struct {
    uint64_t mask;
    int thread_mode;
    char more[252]; /* a set of processors */
} WorkerParams;
typedef struct {
    uint64_t mask;
    const void *address;
    int error_mode;
    void (*on_error)(void *, void *, signed char);
    void *argument;
    char more[128];
} EndpointParams;
typedef struct {
    uint32_t mask, flags;
    char more[96];
} RequestParams;
typedef struct {
    uint64_t tag;
    size_t nbytes;
} TagInfo;

typedef struct { /* in the order in which Python passes them: `FUNCTIONS` of fompi.mpi.ucx */
    signed char (*init)(unsigned, unsigned, const ContextParams *, const void *, void **);
    signed char (*make_worker)(void *, const WorkerParams *, void **);
    signed char (*get_address)(void *, void **, size_t *);
    void (*release_address)(void *, void *);
    signed char (*make_endpoint)(void *, const EndpointParams *, void **);
    void *(*close_endpoint)(void *, const RequestParams *);
    void *(*send)(void *, const void *, size_t, uint64_t, const RequestParams *);
    void *(*send_sync)(void *, const void *, size_t, uint64_t, const RequestParams *);
    void *(*receive)(void *, void *, size_t, uint64_t, uint64_t, const RequestParams *);
    void *(*probe)(void *, uint64_t, uint64_t, int, TagInfo *);
    void *(*receive_probed)(void *, void *, size_t, void *, const RequestParams *);
    signed char (*check)(void *);
    void (*cancel)(void *, void *);
    void (*free_request)(void *);
    unsigned (*progress)(void *);
    void (*destroy_worker)(void *);
    void (*cleanup)(void *);
    const char *(*status_string)(signed char);
} Functions;

typedef struct Endpoint { /* of one peer: it stays at its address, which UCX passes to `lost` */
    void *ucx[MOST_LANES];    /* NULL: it is closed */
    int n_lanes;              /* that both processes have */
    int error;                /* why the peer is lost, as a positive number. 0: it is not */
    int here, there;          /* its number among the peers of this process, and the number of this process among its own */
    int n_groups, n_requests; /* that need it */
    long *losses;             /* of the worker */
} Endpoint;

typedef struct {
    PyObject_HEAD
    Functions ucx;
    void *context, *lanes[MOST_LANES]; /* workers of UCX, in one context */
    int n_lanes;
    pthread_mutex_t lock;
    Endpoint **peers;
    Py_ssize_t n_peers;
    long losses; /* how many peers were lost */
} Worker;

typedef struct { /* the handle of a communicator */
    Worker *worker;
    uint64_t number;
    int size;
    Endpoint *peers[];
} Group;

typedef struct { /* a request that is not done */
    Worker *worker; /* not the group, which may have been freed: nobody waits for some of its messages */
    void *ucx;      /* NULL: what it receives never comes */
    void *lane;     /* the worker of UCX */
    Endpoint *peer; /* NULL: some */
    int is_send, is_cancelled;
} Request;

#define PENDING ((Request *)1) /* a request that Python tests itself */

static const RequestParams plain;

/* Which connection carries a message between this process and a peer. */
static int lane_of(const Endpoint *peer, int tag) { return tag % peer->n_lanes; }

static void progress(Worker *w) {
    for (int k = 0; k < w->n_lanes; k++) w->ucx.progress(w->lanes[k]);
}

static int is_error(const void *ptr) { return (uintptr_t)ptr >= (uintptr_t)(intptr_t)LAST_ERROR; }

static uint64_t tag_of(const Group *g, int sender, int tag) {
    return g->number << (TAG_BITS + SENDER_BITS) | (uint64_t)sender << TAG_BITS | (uint64_t)tag;
}

static void lost(void *argument, void *endpoint, signed char status) {
    Endpoint *peer = argument;
    (void)endpoint;
    if (!peer->error) ++*peer->losses;
    peer->error = -status;
}

/* Notes what UCX has returned for a message in `request`: NULL if it is done. Returns the error.
 *
 * A peer to which nothing can be sent is lost, also if UCX has not said so yet.
 */
static int begun(Worker *w, void *ucx, void *lane, Endpoint *peer, int is_send, Request **request) {
    *request = NULL;
    if (is_error(ucx)) {
        if (!is_send) return -(int)(intptr_t)ucx;
        if (!peer->error) lost(peer, NULL, (signed char)(intptr_t)ucx);
        return 0;
    }
    if (!ucx) return 0;
    Request *made = malloc(sizeof *made);
    if (!made) return 4; /* no memory */
    made->worker = w, made->ucx = ucx, made->lane = lane, made->peer = peer, made->is_send = is_send, made->is_cancelled = 0;
    if (peer) peer->n_requests++;
    *request = made;
    return 0;
}

static int send_to(Group *g, const void *data, size_t nbytes, int dest, int tag, int is_sync, Request **request) {
    Worker *w = g->worker;
    Endpoint *peer = g->peers[dest];
    pthread_mutex_lock(&w->lock);
    void *ucx = NULL;
    if (!peer->error) {
        void *endpoint = peer->ucx[lane_of(peer, tag)];
        ucx = (is_sync ? w->ucx.send_sync : w->ucx.send)(endpoint, data, nbytes, tag_of(g, peer->there, tag), &plain);
    }
    int error = begun(w, ucx, NULL, peer, 1, request);
    pthread_mutex_unlock(&w->lock);
    return error;
}

/* Nobody needs a closed endpoint any more: it may go. */
static void drop(Endpoint *peer) {
    if (!peer->ucx[0] && !peer->n_groups && !peer->n_requests) free(peer);
}

static void forget(Request **request) {
    Request *r = *request;
    if (r->peer) {
        r->peer->n_requests--;
        drop(r->peer);
    }
    free(r);
    *request = NULL;
}

/* What has become of a request: done (1), not yet (0), or an error (negative). Frees what is done. Progress was made. */
static int look(Request **request) {
    Request *r = *request;
    if (!r) return 1;
    if (r == PENDING) return 0;
    Worker *w = r->worker;
    int status = r->ucx ? w->ucx.check(r->ucx) : r->is_cancelled ? 0 : IN_PROGRESS;
    if (status == IN_PROGRESS) return 0;
    if (r->ucx) w->ucx.free_request(r->ucx);
    r->ucx = NULL;
    if (status && status != CANCELED && status != TRUNCATED && r->peer) {
        if (!r->peer->error) lost(r->peer, NULL, (signed char)status);
        if (!r->is_send) return 0;
        status = 0;
    }
    forget(request);
    return status && status != CANCELED ? status : 1;
}

/* ------------------------------------------------------------------------------------------------ as MPI has them */

static int ucx_isend(const void *data, int nbytes, intptr_t type, int dest, int tag, intptr_t group, void *request) {
    (void)type;
    return send_to((Group *)group, data, (size_t)nbytes, dest, tag, 0, request);
}

static int ucx_issend(const void *data, int nbytes, intptr_t type, int dest, int tag, intptr_t group, void *request) {
    (void)type;
    return send_to((Group *)group, data, (size_t)nbytes, dest, tag, 1, request);
}

static int ucx_irecv(void *data, int nbytes, intptr_t type, int source, int tag, intptr_t group, void *request) {
    Group *g = (Group *)group;
    Worker *w = g->worker;
    (void)type;
    pthread_mutex_lock(&w->lock);
    uint64_t wanted = tag_of(g, g->peers[source]->here, tag);
    void *lane = w->lanes[lane_of(g->peers[source], tag)];
    void *ucx = w->ucx.receive(lane, data, (size_t)nbytes, wanted, ALL_BITS, &plain);
    int error = begun(w, ucx, lane, g->peers[source], 0, request);
    pthread_mutex_unlock(&w->lock);
    return error;
}

static int ucx_testsome(int n, void *requests, int *done, int *indices, void *statuses) {
    Request **all = requests;
    Worker *w = NULL;
    int error = 0;
    (void)statuses;
    *done = 0;
    for (int k = 0; k < n && !w; k++) w = all[k] && all[k] != PENDING ? all[k]->worker : NULL;
    if (w) {
        pthread_mutex_lock(&w->lock);
        progress(w);
    }
    for (int k = 0; k < n; k++) {
        int status = look(&all[k]);
        if (status < 0 && !error) error = -status;
        if (status) indices[(*done)++] = k;
    }
    if (w) pthread_mutex_unlock(&w->lock);
    return error;
}

static int ucx_test(void *request, int *is_done, void *status) {
    int index;
    return ucx_testsome(1, request, is_done, &index, status);
}

/* ------------------------------------------------------------------------------------------------ Worker */

/* Progress until `ucx`, a request or what stands for one, is done: 1 if it is, 0 with an error, -1 if it does not end. */
static int ends(Worker *w, void *ucx) {
    int status = IN_PROGRESS;
    if (!ucx || is_error(ucx)) return !ucx;
    for (int k = 0; k < MOST_ROUNDS && (status = w->ucx.check(ucx)) == IN_PROGRESS; k++) progress(w);
    w->ucx.free_request(ucx);
    return status == IN_PROGRESS ? -1 : !status;
}

static PyObject *failed(const Worker *w, int error) {
    PyErr_Format(PyExc_ConnectionError, "%s", w->ucx.status_string((signed char)-error));
    return NULL;
}

static PyObject *worker_new(PyTypeObject *type, PyObject *args, PyObject *options) {
    PyObject *addresses;
    void *found[sizeof(Functions) / sizeof(void *)];
    (void)options;
    int n_lanes;
    if (!PyArg_ParseTuple(args, "O!i", &PyTuple_Type, &addresses, &n_lanes)) return NULL;
    if (n_lanes < 1 || n_lanes > MOST_LANES) return PyErr_Format(PyExc_ValueError, "1 to %d connections, not %d", MOST_LANES, n_lanes);
    if (PyTuple_Size(addresses) != (Py_ssize_t)(sizeof found / sizeof *found)) {
        PyErr_SetString(PyExc_ValueError, "these are not the functions of UCX");
        return NULL;
    }
    for (size_t k = 0; k < sizeof found / sizeof *found; k++) {
        found[k] = PyLong_AsVoidPtr(PyTuple_GetItem(addresses, (Py_ssize_t)k));
        if (!found[k]) return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "function %zu of UCX has no address", k);
    }
    Worker *w = (Worker *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!w) return NULL;
    memcpy(&w->ucx, found, sizeof found);
    pthread_mutex_init(&w->lock, NULL);
    ContextParams context = {.mask = 1, .features = 1}; /* tags */
    WorkerParams params = {.mask = 1, .thread_mode = 1}; /* several threads, one at a time */
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = w->ucx.init(1, 8, &context, NULL, &w->context);
    for (; !status && w->n_lanes < n_lanes; w->n_lanes += !status)
        status = w->ucx.make_worker(w->context, &params, &w->lanes[w->n_lanes]);
    Py_END_ALLOW_THREADS
    if (status) {
        failed(w, -status);
        Py_DECREF(w);
        return NULL;
    }
    return (PyObject *)w;
}

/* address(): (the address of each worker of UCX). */
static PyObject *worker_address(PyObject *self, PyObject *nothing) {
    Worker *w = (Worker *)self;
    void *address;
    size_t nbytes;
    PyObject *made = PyTuple_New(w->n_lanes);
    (void)nothing;
    for (int k = 0; made && k < w->n_lanes; k++) {
        pthread_mutex_lock(&w->lock);
        int status = w->ucx.get_address(w->lanes[k], &address, &nbytes);
        PyObject *one = status ? failed(w, -status) : PyBytes_FromStringAndSize(address, (Py_ssize_t)nbytes);
        if (!status) w->ucx.release_address(w->lanes[k], address);
        pthread_mutex_unlock(&w->lock);
        if (one)
            PyTuple_SetItem(made, k, one);
        else
            Py_CLEAR(made);
    }
    return made;
}

static void close_endpoints(Worker *w, Endpoint *peer) {
    RequestParams force = {.mask = 16, .flags = 1};
    for (int k = 0; k < peer->n_lanes; k++) {
        if (peer->ucx[k]) ends(w, w->ucx.close_endpoint(peer->ucx[k], &force));
        peer->ucx[k] = NULL;
    }
}

/* connect((addresses), there): the lowest number that no peer has. */
static PyObject *worker_connect(PyObject *self, PyObject *args) {
    Worker *w = (Worker *)self;
    Py_ssize_t number = 0;
    PyObject *addresses;
    int there, status = 0;
    if (!PyArg_ParseTuple(args, "O!i", &PyTuple_Type, &addresses, &there)) return NULL;
    while (number < w->n_peers && w->peers[number]) number++;
    if (number >> SENDER_BITS) return PyErr_Format(PyExc_ValueError, "more than %d peers", 1 << SENDER_BITS);
    Endpoint **peers = number < w->n_peers ? w->peers : realloc(w->peers, (size_t)(number + 1) * sizeof *peers);
    Endpoint *peer = calloc(1, sizeof *peer);
    if (peers) w->peers = peers;
    if (!peers || !peer) {
        free(peer);
        return PyErr_NoMemory();
    }
    peer->losses = &w->losses, peer->here = (int)number, peer->there = there;
    peer->n_lanes = PyTuple_Size(addresses) < w->n_lanes ? (int)PyTuple_Size(addresses) : w->n_lanes;
    pthread_mutex_lock(&w->lock);
    for (int k = 0; k < peer->n_lanes && !status; k++) {
        EndpointParams params = {.mask = 1 | 2 | 4, .error_mode = 1, .on_error = lost, .argument = peer};
        params.address = PyBytes_AsString(PyTuple_GetItem(addresses, k));
        status = params.address ? w->ucx.make_endpoint(w->lanes[k], &params, &peer->ucx[k]) : CANCELED;
    }
    if (status || !peer->n_lanes) {
        close_endpoints(w, peer);
        free(peer);
    }
    pthread_mutex_unlock(&w->lock);
    if (PyErr_Occurred()) return NULL;
    if (status) return failed(w, -status);
    if (!PyTuple_Size(addresses)) return PyErr_Format(PyExc_ValueError, "a peer has an address");
    w->peers[number] = peer;
    if (number == w->n_peers) w->n_peers++;
    return PyLong_FromSsize_t(number);
}

static Endpoint *peer_of(Worker *w, Py_ssize_t number) {
    if (number >= 0 && number < w->n_peers && w->peers[number]) return w->peers[number];
    PyErr_Format(PyExc_ValueError, "there is no peer %zd", number);
    return NULL;
}

static PyObject *worker_error(PyObject *self, PyObject *args) {
    Worker *w = (Worker *)self;
    Py_ssize_t number;
    Endpoint *peer;
    if (!PyArg_ParseTuple(args, "n", &number) || !(peer = peer_of(w, number))) return NULL;
    return PyUnicode_FromString(peer->error ? w->ucx.status_string((signed char)-peer->error) : "");
}

/* known_as(peer, there): it has said by which number it counts this process. */
static PyObject *worker_known_as(PyObject *self, PyObject *args) {
    Py_ssize_t number;
    int there;
    Endpoint *peer;
    if (!PyArg_ParseTuple(args, "ni", &number, &there) || !(peer = peer_of((Worker *)self, number))) return NULL;
    if (there < 0 || there >> SENDER_BITS) return PyErr_Format(PyExc_ValueError, "there is no peer %d", there);
    peer->there = there;
    Py_RETURN_NONE;
}

/* disconnect(peer): True if it is closed, False if a group needs it. */
static PyObject *worker_disconnect(PyObject *self, PyObject *args) {
    Worker *w = (Worker *)self;
    Py_ssize_t number;
    Endpoint *peer;
    if (!PyArg_ParseTuple(args, "n", &number) || !(peer = peer_of(w, number))) return NULL;
    if (peer->n_groups) Py_RETURN_FALSE;
    pthread_mutex_lock(&w->lock);
    close_endpoints(w, peer);
    if (!peer->error) peer->error = -CANCELED;
    w->peers[number] = NULL;
    drop(peer);
    pthread_mutex_unlock(&w->lock);
    Py_RETURN_TRUE;
}

static void free_group(Group *g) {
    for (int k = 0; k < g->size; k++)
        if (g->peers[k]) g->peers[k]->n_groups--;
    free(g);
}

static PyObject *worker_group(PyObject *self, PyObject *args) {
    Worker *w = (Worker *)self;
    unsigned long long number;
    PyObject *peers;
    if (!PyArg_ParseTuple(args, "KO!", &number, &PyTuple_Type, &peers)) return NULL;
    Py_ssize_t size = PyTuple_Size(peers);
    if (number >= MEETING >> (TAG_BITS + SENDER_BITS)) return PyErr_Format(PyExc_ValueError, "no group has the number %llu", number);
    Group *g = calloc(1, sizeof *g + (size_t)size * sizeof *g->peers);
    if (!g) return PyErr_NoMemory();
    g->worker = w, g->number = number, g->size = (int)size;
    for (Py_ssize_t k = 0; k < size; k++) {
        g->peers[k] = peer_of(w, PyLong_AsSsize_t(PyTuple_GetItem(peers, k)));
        if (!g->peers[k]) {
            free_group(g);
            return NULL;
        }
        g->peers[k]->n_groups++;
    }
    return PyLong_FromVoidPtr(g);
}

static PyObject *worker_free(PyObject *self, PyObject *args) {
    unsigned long long group;
    (void)self;
    if (!PyArg_ParseTuple(args, "K", &group)) return NULL;
    free_group((Group *)(uintptr_t)group);
    Py_RETURN_NONE;
}

/* Memory of Python for a message. 0: there is an error. */
static int memory_of(PyObject *object, Py_buffer *view, int is_written) {
    return !PyObject_GetBuffer(object, view, is_written ? PyBUF_WRITABLE : PyBUF_SIMPLE);
}

static PyObject *worker_send(PyObject *self, PyObject *args) {
    unsigned long long group;
    PyObject *data;
    int dest, tag, is_sync;
    Py_buffer view;
    Request *request;
    if (!PyArg_ParseTuple(args, "KOiip", &group, &data, &dest, &tag, &is_sync) || !memory_of(data, &view, 0)) return NULL;
    int error = send_to((Group *)(uintptr_t)group, view.buf, (size_t)view.len, dest, tag, is_sync, &request);
    PyBuffer_Release(&view); /* the request of Python keeps it */
    return error ? failed((Worker *)self, error) : PyLong_FromVoidPtr(request);
}

static PyObject *worker_receive(PyObject *self, PyObject *args) {
    Worker *w = (Worker *)self;
    unsigned long long group, message;
    PyObject *data;
    int source, tag, number;
    Py_buffer view;
    Request *request;
    if (!PyArg_ParseTuple(args, "KOiiKi", &group, &data, &source, &tag, &message, &number) || !memory_of(data, &view, 1)) return NULL;
    Group *g = (Group *)(uintptr_t)group;
    pthread_mutex_lock(&w->lock);
    void *probed = (void *)(uintptr_t)message, *lane = w->lanes[probed ? number : lane_of(g->peers[source], tag)];
    void *ucx = probed ? w->ucx.receive_probed(lane, view.buf, (size_t)view.len, probed, &plain)
                       : w->ucx.receive(lane, view.buf, (size_t)view.len, tag_of(g, g->peers[source]->here, tag), ALL_BITS, &plain);
    int error = begun(w, ucx, lane, probed ? NULL : g->peers[source], 0, &request);
    pthread_mutex_unlock(&w->lock);
    PyBuffer_Release(&view);
    return error ? failed(w, error) : PyLong_FromVoidPtr(request);
}

/* probe(group, source, tag, takes): (the message or 0, its sender, its connection), or None. A source of -1: any. */
static PyObject *worker_probe(PyObject *self, PyObject *args) {
    Worker *w = (Worker *)self;
    unsigned long long group;
    int source, tag, takes;
    TagInfo info;
    if (!PyArg_ParseTuple(args, "Kiip", &group, &source, &tag, &takes)) return NULL;
    Group *g = (Group *)(uintptr_t)group;
    pthread_mutex_lock(&w->lock);
    progress(w);
    uint64_t wanted = tag_of(g, source < 0 ? 0 : g->peers[source]->here, tag), mask = source < 0 ? ANY_SENDER : ALL_BITS;
    void *message = NULL;
    int lane = -1;
    while (!message && ++lane < w->n_lanes) message = w->ucx.probe(w->lanes[lane], wanted, mask, takes, &info);
    pthread_mutex_unlock(&w->lock);
    if (!message) Py_RETURN_NONE;
    int number = (int)(info.tag >> TAG_BITS & ((1u << SENDER_BITS) - 1)), sender = 0;
    while (sender < g->size - 1 && g->peers[sender]->here != number) sender++;
    return Py_BuildValue("(Kii)", takes ? (unsigned long long)(uintptr_t)message : 0, sender, lane);
}

/* tell(peer, data): to a process that has no group with this one. */
static PyObject *worker_tell(PyObject *self, PyObject *args) {
    Worker *w = (Worker *)self;
    Py_ssize_t number, nbytes;
    const char *data;
    Endpoint *peer;
    Request *request;
    if (!PyArg_ParseTuple(args, "ny#", &number, &data, &nbytes) || !(peer = peer_of(w, number))) return NULL;
    pthread_mutex_lock(&w->lock);
    int error = begun(w, peer->error ? NULL : w->ucx.send(peer->ucx[0], data, (size_t)nbytes, MEETING, &plain), NULL, peer, 1, &request);
    pthread_mutex_unlock(&w->lock);
    return error ? failed(w, error) : PyLong_FromVoidPtr(request);
}

/* heard(): what some process has told this one, or None. What is longer than a word of a member is nothing. */
static PyObject *worker_heard(PyObject *self, PyObject *nothing) {
    Worker *w = (Worker *)self;
    TagInfo info;
    char *word = malloc(MOST_WORDS);
    (void)nothing;
    if (!word) return PyErr_NoMemory();
    pthread_mutex_lock(&w->lock);
    progress(w);
    void *message = w->ucx.probe(w->lanes[0], MEETING, ANY_OF_GROUP, 1, &info);
    int is_whole = message ? ends(w, w->ucx.receive_probed(w->lanes[0], word, MOST_WORDS, message, &plain)) : 0;
    pthread_mutex_unlock(&w->lock);
    PyObject *heard = PyBytes_FromStringAndSize(word, is_whole > 0 ? (Py_ssize_t)info.nbytes : 0);
    if (is_whole >= 0) free(word); /* else it may still be written to */
    if (message) return heard;
    Py_XDECREF(heard);
    Py_RETURN_NONE;
}

/* discard(number): the messages of a group that is gone. Returns how many there were. */
static PyObject *worker_discard(PyObject *self, PyObject *args) {
    Worker *w = (Worker *)self;
    unsigned long long number;
    TagInfo info;
    void *message;
    long count = 0;
    if (!PyArg_ParseTuple(args, "K", &number)) return NULL;
    pthread_mutex_lock(&w->lock);
    progress(w);
    for (int k = 0; k < w->n_lanes; k++)
        while ((message = w->ucx.probe(w->lanes[k], number << (TAG_BITS + SENDER_BITS), ANY_OF_GROUP, 1, &info))) {
            ends(w, w->ucx.receive_probed(w->lanes[k], NULL, 0, message, &plain)); /* cut off: its sender goes on */
            count++;
        }
    pthread_mutex_unlock(&w->lock);
    return PyLong_FromLong(count);
}

/* testsome([requests]): the indices of those that are done, which are freed. Raises ConnectionError, with nothing lost. */
static PyObject *worker_testsome(PyObject *self, PyObject *args) {
    Worker *w = (Worker *)self;
    PyObject *given;
    if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &given)) return NULL;
    int n = (int)PyList_Size(given), n_done, error = 0;
    Request **requests = malloc((size_t)(n ? n : 1) * sizeof *requests);
    int *indices = malloc((size_t)(n ? n : 1) * sizeof *indices);
    PyObject *done = NULL;
    if (requests && indices) {
        for (int k = 0; k < n; k++) requests[k] = PyLong_AsVoidPtr(PyList_GetItem(given, k));
        error = ucx_testsome(n, requests, &n_done, indices, NULL);
        done = PyList_New(0);
        for (int k = 0; done && k < n_done; k++) {
            PyObject *index = PyLong_FromLong(indices[k]);
            if (index) PyList_Append(done, index);
            Py_XDECREF(index);
        }
    } else {
        PyErr_NoMemory();
    }
    free(requests);
    free(indices);
    if (!done) return NULL;
    PyObject *both = Py_BuildValue("(Ns)", done, error ? w->ucx.status_string((signed char)-error) : "");
    return both;
}

static PyObject *worker_cancel(PyObject *self, PyObject *args) {
    Worker *w = (Worker *)self;
    unsigned long long request;
    if (!PyArg_ParseTuple(args, "K", &request)) return NULL;
    Request *r = (Request *)(uintptr_t)request;
    pthread_mutex_lock(&w->lock);
    if (r && r->ucx && r->lane) w->ucx.cancel(r->lane, r->ucx);
    if (r) r->is_cancelled = 1;
    pthread_mutex_unlock(&w->lock);
    Py_RETURN_NONE;
}

static PyObject *worker_why(PyObject *self, PyObject *args) {
    int error;
    if (!PyArg_ParseTuple(args, "i", &error)) return NULL;
    return PyUnicode_FromString(((Worker *)self)->ucx.status_string((signed char)-error));
}

static PyObject *worker_close(PyObject *self, PyObject *nothing) {
    Worker *w = (Worker *)self;
    (void)nothing;
    pthread_mutex_lock(&w->lock);
    while (w->n_lanes) w->ucx.destroy_worker(w->lanes[--w->n_lanes]);
    if (w->context) w->ucx.cleanup(w->context);
    w->context = NULL;
    pthread_mutex_unlock(&w->lock);
    Py_RETURN_NONE;
}

static PyObject *worker_addresses(PyObject *self, void *nothing) {
    (void)self, (void)nothing;
    return Py_BuildValue("(KKKKK)", (unsigned long long)(uintptr_t)ucx_isend, (unsigned long long)(uintptr_t)ucx_issend,
                         (unsigned long long)(uintptr_t)ucx_irecv, (unsigned long long)(uintptr_t)ucx_test,
                         (unsigned long long)(uintptr_t)ucx_testsome);
}

static PyMemberDef members[] = {
    {"losses", T_LONG, offsetof(Worker, losses), READONLY, "how many peers were lost"},
    {NULL, 0, 0, 0, NULL},
};
static PyMethodDef methods[] = {
    {"address", worker_address, METH_NOARGS, "address(): (the addresses) by which others connect to this worker."},
    {"connect", worker_connect, METH_VARARGS, "connect((addresses), there): the number of a new peer, which counts this process as `there`."},
    {"known_as", worker_known_as, METH_VARARGS, "known_as(peer, there): it counts this process as `there`."},
    {"disconnect", worker_disconnect, METH_VARARGS, "disconnect(peer): False if a group needs it."},
    {"error", worker_error, METH_VARARGS, "error(peer): why it is lost, or \"\"."},
    {"group", worker_group, METH_VARARGS, "group(number, (peers)): the handle of a group."},
    {"free", worker_free, METH_VARARGS, "free(group): it has no message in flight."},
    {"send", worker_send, METH_VARARGS, "send(group, data, dest, tag, is_sync): a request, 0 if it is done."},
    {"receive", worker_receive, METH_VARARGS, "receive(group, data, source, tag, message, connection): a request, 0 if it is done."},
    {"probe", worker_probe, METH_VARARGS, "probe(group, source, tag, takes): (message, sender, connection), or None."},
    {"tell", worker_tell, METH_VARARGS, "tell(peer, data): a request, 0 if it is done."},
    {"heard", worker_heard, METH_NOARGS, "heard(): what a process has told this one, or None."},
    {"discard", worker_discard, METH_VARARGS, "discard(number): the messages of a group that is gone."},
    {"testsome", worker_testsome, METH_VARARGS, "testsome([requests]): ([indices of those that are done], an error or \"\")."},
    {"cancel", worker_cancel, METH_VARARGS, "cancel(request)"},
    {"why", worker_why, METH_VARARGS, "why(error): the error of a function in C, in words."},
    {"close", worker_close, METH_NOARGS, "close(): it has no peers."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef attributes[] = {
    {"addresses", worker_addresses, NULL, "the functions isend, issend, irecv, test and testsome, as MPI has them", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot slots[] = {
    {Py_tp_new, worker_new}, {Py_tp_methods, methods}, {Py_tp_getset, attributes}, {Py_tp_members, members},
    {Py_tp_doc, "Worker(addresses, connections): messages by UCX, whose functions are at these addresses."}, {0, NULL},
};
static PyType_Spec spec = {"fompi.native._native.Worker", sizeof(Worker), 0, Py_TPFLAGS_DEFAULT, slots};

PyObject *ucx_worker_type(void) { return PyType_FromSpec(&spec); }
