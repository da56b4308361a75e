/* The good case of a call in C: the loop of dispatch.py, in_flight.py, engine.py and progress.py, without the GIL.
 *
 * docs/inside/native.md names the Python line that each rule here equals. Everything else is Python's: at any point
 * `export` gives the counters, times and requests of a call, and `fompi.runtime.native_run` goes on from there.
 *
 * A call that `run` does not finish is in flight: the progress thread, `Library.poll`, and each `run` and `drive` of
 * another call go on with it. Kernels that are Python's are handed out by `take`, and come back by `ran`.
 *
 * `Library.lock` guards all calls, from `run` until they are finished or exported. It is free while a kernel runs, but for
 * small ones. Nobody waits for it, or for a kernel, with the GIL, nor for the GIL with it, and the progress thread never
 * takes the GIL. Python's threads hold the engine's lock of Python, too.
 *
 * There is no mpi.h. Functions of MPI are addresses, handles are `intptr_t` (an int of MPICH, a pointer of Open MPI), a
 * request has `request_nbytes` bytes, and a status is memory of STATUS_NBYTES that nobody reads.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "chain.h"
#include "kernels.h"
#include "ucx.h"
#include "v3.h"
#include "xla.h"

#define STATUS_NBYTES 64
#define MOST_REQUEST_NBYTES 16
#define MOST_ROUNDS 32          /* of polls in a row, if each one moves something */
#define COPY_SECONDS 1e-5       /* a round that took longer may have copied a part of a message: there may be more of it */
#define PART_NBYTES 16384       /* such a part has this many bytes, or more */
#define SLICE_NANOSECONDS 100000
#define WAKES_SHARE 0.01        /* of a rank's only core, for wake-ups that move nothing; its caches cost as much again */
#define MOST_PAUSE 4e-3         /* however dear they are, as where many calls are in flight */
#define COST_WAKES 16           /* their cost is an average over this many */
#define IDLE_SECONDS 2e-3       /* with nothing to do on a rank's only core it sleeps and wakes so long, and then until it is woken */
#define ASLEEP_SECONDS 5e-5    /* between polls while the program sleeps, and its core has nothing else to do */

/* The module exports the numbers of all these `enum`s (`numbers`): Python has no others. */
enum { SEND, RECV, KERNEL, CHECK, PYTHON }; /* kinds of ops; a CHECK goes on if two chunks are equal, the first `number` of
                                              every `divisor` bytes; a kernel of Python */
enum { SYNCHRONOUS = 1, TESTED = 2, ABSOLUTE = 4, CARRIED = 8 }; /* Issend; tested at once; `number` is the tag itself; of a
                                                                  receive: a header may have carried the data */
enum { MERGE = 1 }; /* flag of a kernel of Python: a sum or a copy */
enum { AWAITS_ROWS = 1, ROWS_BITS = 34 }; /* flag of a CHECK of headers: their rows may differ, the lowest bits of the third
                                             word; what saves a second round is not compared; it is over when the call is `sized` */
enum { FINISHED, GOES_ON, STALLED, FAILED, DISAGREES, HAS_KERNELS }; /* the state of a call; the last: for Python */
enum { MOVED = 1, HAS_ENDED = 2, HAS_READY = 4 }; /* what `Library.poll` returns; the last two are the news for Python */

typedef intptr_t Handle;
typedef struct Call Call;

static Kernel compute; /* of this processor */

typedef struct { /* the dtype `OP` of fompi.runtime.lower */
    int32_t kind, kernel, flags, peer, number, divisor; /* flags of a kernel: its operands that are float32 */
    int32_t buffers[3]; /* of a message: the first. Of a kernel: two operands (or one) and the result */
    int32_t dtype;
    int64_t offsets[3]; /* in bytes. Of a message that a header may carry: the data, the word of the header that says so if it
                           is equal to the third */
    int64_t count;      /* bytes of a message, elements of a kernel */
} Op;

typedef struct { /* the dtype `BLOCKS` of fompi.runtime.lower: what an op moves, for any rows; of a buffer: its rows */
    int32_t first[3], last[3]; /* of each operand: its first row, and the row behind its last, are starts[first], starts[last].
                                  0: the operand stays as it is. A buffer has starts[first[0]] rows */
    int32_t size[3];           /* bytes of an element of a kernel; 0: C counts this operand itself */
    int32_t flags[2];          /* of a message that is small, and of another one */
    int64_t width[3];          /* bytes of a row */
} Blocks;

typedef struct {
    PyObject_HEAD
    int (*isend)(const void *, int, Handle, int, int, Handle, void *);
    int (*issend)(const void *, int, Handle, int, int, Handle, void *);
    int (*irecv)(void *, int, Handle, int, int, Handle, void *);
    int (*test)(void *, int *, void *);
    int (*testsome)(int, void *, int *, int *, void *);
    Handle byte;
    Py_ssize_t request_nbytes;
    int yields, polls_per_wake, polls_per_message; /* the pace of the engine of Python (`engine.PACE`) */
    double nap, linger;                            /* seconds */
    pid_t process;
    pthread_mutex_t lock;
    int wanted;      /* how many threads ask for the lock while it is held: atomic */
    int handing;     /* how many threads in `let_others` wait for their turn */
    long turns;      /* how often the lock went to one of both kinds */
    pthread_cond_t turn;
    Call *in_flight; /* the calls in flight, in the order in which they began */
    int news;        /* what `Library.poll` has not told */
    int is_watched;  /* Python wants to be woken when a call has ended */
    int taken;       /* kernels that Python runs now */
    long rounds;     /* rounds of polls, by any thread */
    pthread_cond_t told, idle; /* there are news, or Python is woken; no kernel of a call that stays runs, or no thread */
    int is_woken;
    double kernel_began, longest_forwarding; /* as in engine.py */
    /* the progress thread */
    pthread_t thread;
    pthread_cond_t wake;
    int has_thread, stops, sleeps; /* the first is read without the lock */
    double least, most, seconds; /* between its polls: at least, at most, now */
    double cost;                 /* of a wake-up that moves nothing: seconds of the core */
    int waiting, kernels;        /* threads that drive a call: they poll when they wake. Long kernels that run, of theirs */
    pid_t program, opened;       /* the thread that has left the last call in flight, if each rank has a core; whose `stat` is open */
    int stat;
} Library;

struct Call {
    PyObject_HEAD
    Library *library;
    Call *next, *previous; /* in flight */
    int is_in_flight, is_long, forwards, n_running, n_taken;
    int has_news, stays; /* kernels of Python can run that nobody was told of; somebody waits until no kernel runs */
    int32_t n_ops, n_first, n_messages, n_python_ops, n_buffers, is_small, spins;
    Op *ops;
    int32_t *start_at, *start_to, *done_at, *done_to; /* op i frees start_to[start_at[i] .. start_at[i + 1]] at its start */
    int32_t *blockers_at_first, *first;
    int64_t *nbytes; /* of the buffers */
    char **bases, *needs; /* where they are; 1: an op of C uses it */
    int32_t *given, n_given, n_stamped, stamped_every; /* `forms`: what `begin` writes */
    Blocks *blocks; /* of the ops, then of the buffers. NULL: its rows stay as they are */
    int32_t n_starts, is_unsized, rows_op; /* 1: no rows have fit; the CHECK that awaits rows, or -1 */
    int64_t small_nbytes, most_nbytes;
    Handle comm;
    /* the call in flight */
    int32_t tag, unfinished, head, tail, n_ready, n_python, n_timed, n_pending, is_driven;
    int32_t *blockers, *queue, *ready, *python, *timed, *owners, *indices, *finished;
    char *requests, *statuses;
    double *begun, *ended, *dues, started, moved_at; /* `timed` kernels are done when they are due */
    int error, disagrees;
};

static double seconds_of(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double now(void) { return seconds_of(CLOCK_MONOTONIC); }

static double cpu_seconds(void) { return seconds_of(CLOCK_THREAD_CPUTIME_ID); }

/* ------------------------------------------------------------------------------------------------ the lock */

static void take_turn(Library *mpi) {
    mpi->turns++;
    if (mpi->handing) pthread_cond_broadcast(&mpi->turn);
}

static void lock(Library *mpi) {
    if (!pthread_mutex_trylock(&mpi->lock)) return;
    __atomic_add_fetch(&mpi->wanted, 1, __ATOMIC_RELAXED);
    pthread_mutex_lock(&mpi->lock);
    __atomic_sub_fetch(&mpi->wanted, 1, __ATOMIC_RELAXED);
    take_turn(mpi);
}

static void unlock(Library *mpi) { pthread_mutex_unlock(&mpi->lock); }

/* Until `unlock_with_gil` nothing of Python may be used: it may be without the GIL, so that nobody waits for it with the lock. */
static PyThreadState *lock_with_gil(Library *mpi) {
    if (!pthread_mutex_trylock(&mpi->lock)) return NULL;
    PyThreadState *python = PyEval_SaveThread();
    lock(mpi);
    return python;
}

static void unlock_with_gil(Library *mpi, PyThreadState *python) {
    unlock(mpi);
    if (python) PyEval_RestoreThread(python);
}

/* Hands the lock to a thread that asks for it, and comes back after that one. Mutexes are not fair: a thread that frees one
 * and takes it again does so before another one has woken.
 *
 * A thread waits here until `turns` is another number. It does not wait for ever: what `wanted` counts will take the lock,
 * because nobody gives up, and so will a thread here whose turn has come. Both count `turns` up. */
static void let_others(Library *mpi) {
    long turn = mpi->turns;
    if (!mpi->handing && !__atomic_load_n(&mpi->wanted, __ATOMIC_RELAXED)) return;
    mpi->handing++;
    while (mpi->turns == turn) pthread_cond_wait(&mpi->turn, &mpi->lock);
    mpi->handing--;
    take_turn(mpi);
}

static void sleep_for(double seconds) {
    struct timespec t = {(time_t)seconds, (long)(1e9 * (seconds - (double)(time_t)seconds))};
    nanosleep(&t, NULL);
}

static void wait_until(pthread_cond_t *condition, Library *mpi, double until) {
    struct timespec t = {(time_t)until, (long)(1e9 * (until - (double)(time_t)until))};
    pthread_cond_timedwait(condition, &mpi->lock, &t);
}

/* ------------------------------------------------------------------------------------------------ one op */

static char *at(const Call *c, const Op *o, int k) { return c->bases[o->buffers[k]] + o->offsets[k]; }

static void run_kernel(Call *c, const Op *o) {
    if (o->count) compute(o->kernel, o->dtype, o->divisor, o->flags, at(c, o, 0), at(c, o, 1), at(c, o, 2), o->count);
}

static void release(Call *c, const int32_t *from, const int32_t *to, int32_t i) {
    for (int32_t e = from[i]; e < from[i + 1]; e++)
        if (--c->blockers[to[e]] == 0) c->queue[c->tail++] = to[e];
}

static void complete_at(Call *c, int32_t i, double t) {
    __atomic_store(&c->moved_at, &t, __ATOMIC_RELAXED); /* Python reads both without the lock */
    __atomic_store(&c->ended[i], &t, __ATOMIC_RELEASE);
    c->unfinished--;
    release(c, c->done_at, c->done_to, i);
}

static void complete(Call *c, int32_t i) { complete_at(c, i, now()); }

static int are_equal(const Call *c, const Op *o) {
    const char *a = at(c, o, 0), *b = at(c, o, 1);
    for (int64_t k = 0; k < o->count; k += o->divisor) {
        if (o->flags & AWAITS_ROWS) {
            int64_t mine[4], theirs[4]; /* the call, its digest, hint and rows, how many rows are expected */
            memcpy(mine, a + k, sizeof mine);
            memcpy(theirs, b + k, sizeof theirs);
            if (mine[0] != theirs[0] || mine[1] != theirs[1] || mine[2] >> ROWS_BITS != theirs[2] >> ROWS_BITS || mine[3] != theirs[3])
                return 0;
        } else if (memcmp(a + k, b + k, (size_t)o->number)) {
            return 0;
        }
    }
    return 1;
}

/* The data of this receive, if the header of its peer has carried them: they stand behind the word that says so. */
static const char *carried(const Call *c, const Op *o) {
    const char *word = at(c, o, 1);
    return memcmp(word, &o->offsets[2], sizeof(int64_t)) ? NULL : word + sizeof(int64_t);
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
    const char *data = o->flags & CARRIED ? carried(c, o) : NULL;
    if (data) {
        memcpy(at(c, o, 0), data, (size_t)o->count);
        complete(c, i);
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

static void kernel_ready(int32_t *ready, int32_t n, int32_t i) { /* descending: the first op of the program is the last */
    for (; n > 0 && ready[n - 1] < i; n--) ready[n] = ready[n - 1];
    ready[n] = i;
}

static void start_ops(Call *c) {
    while (c->head < c->tail && !c->error && !c->disagrees) {
        int32_t i = c->queue[c->head];
        const Op *o = &c->ops[i];
        if (o->kind == KERNEL && !c->is_small) {
            c->head++;
            kernel_ready(c->ready, c->n_ready++, i);
            continue;
        }
        if (o->kind == PYTHON) {
            c->head++;
            kernel_ready(c->python, c->n_python++, i);
            c->has_news = 1;
            continue;
        }
        if (o->kind == CHECK && !are_equal(c, o)) {
            c->disagrees = 1;
            return;
        }
        if (o->kind == CHECK && o->flags & AWAITS_ROWS) {
            c->head++;
            kernel_ready(c->python, c->n_python++, i);
            continue;
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

/* The timed kernels that are due. */
static int poll_timed(Call *c) {
    double t = now();
    int moved = 0;
    for (int32_t k = 0; k < c->n_timed;) {
        int32_t i = c->timed[k];
        if (c->dues[i] > t) {
            k++;
            continue;
        }
        c->timed[k] = c->timed[--c->n_timed];
        complete_at(c, i, c->dues[i]);
        moved = 1;
    }
    if (moved) start_ops(c);
    return moved;
}

static int poll(Call *c) {
    int n = 0, moved = c->n_timed ? poll_timed(c) : 0;
    if (!c->n_pending || c->error) return moved;
    if (c->n_pending == 1) {
        c->error = c->library->test(c->requests, &n, c->statuses);
        c->indices[0] = 0;
    } else {
        c->error = c->library->testsome(c->n_pending, c->requests, &n, c->indices, c->statuses);
    }
    if (c->error || n <= 0) return moved; /* MPI_UNDEFINED is negative */
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

static int state_of(const Call *c) {
    return c->error ? FAILED : c->disagrees ? DISAGREES : c->unfinished ? GOES_ON : FINISHED;
}

/* A kernel has run, and was begun before. The lock is held. */
static void ran(Call *c, int32_t i) {
    complete(c, i);
    release(c, c->start_at, c->start_to, i);
    start_ops(c);
}

/* 1: the progress thread has nothing to do. No call is in flight, or another thread polls for all. */
static int has_rest(const Library *mpi) { return !mpi->in_flight || mpi->waiting > mpi->kernels; }

/* Wakes the progress thread if it sleeps, and has something to do now. */
static void stir(Library *mpi) {
    if (mpi->sleeps && !has_rest(mpi)) pthread_cond_signal(&mpi->wake);
}

/* Runs the first kernel that can run, without the lock. Calls may have come and gone meanwhile, but not this one. */
static void run_first(Call *c) {
    Library *mpi = c->library;
    int32_t i = c->ready[--c->n_ready];
    int is_long = c->is_long;
    c->begun[i] = now();
    c->n_running++;
    mpi->kernels += is_long;
    stir(mpi);
    unlock(mpi);
    run_kernel(c, &c->ops[i]);
    lock(mpi);
    mpi->kernels -= is_long;
    ran(c, i);
    if (--c->n_running == 0 && c->stays) pthread_cond_broadcast(&mpi->idle);
}

/* How long the progress thread sleeps at least: of a rank's only core its wake-ups take no more than WAKES_SHARE. */
static double least_pause(const Library *mpi) {
    double seconds = mpi->cost / WAKES_SHARE < MOST_PAUSE / 2 ? mpi->cost / WAKES_SHARE : MOST_PAUSE / 2;
    return mpi->least == mpi->most || seconds < mpi->least ? mpi->least : seconds;
}

static double most_pause(const Library *mpi) {
    double seconds = 2 * least_pause(mpi);
    return mpi->least == mpi->most || seconds < mpi->most ? mpi->most : seconds;
}

static int can_run(const Call *c) { return c->n_ready && !c->error && !c->disagrees && !c->stays; }

static void depart(Call *c) { /* it is in flight from now on */
    Call **last = &c->library->in_flight;
    if (c->is_in_flight) return;
    c->next = c->previous = NULL;
    if (!*last) c->library->seconds = least_pause(c->library); /* its first messages may come soon */
    for (; *last; last = &(*last)->next) c->previous = *last;
    *last = c;
    c->is_in_flight = 1;
    stir(c->library);
}

static void land(Call *c) {
    if (!c->is_in_flight) return;
    if (c->next) c->next->previous = c->previous;
    if (c->previous) c->previous->next = c->next;
    else c->library->in_flight = c->next;
    __atomic_store_n(&c->is_in_flight, 0, __ATOMIC_RELEASE); /* `refuse_if_unfinished` */
}

/* Takes a call out of the calls in flight that C goes on with no more, and notes what Python must know of it. */
static void settle(Call *c) {
    if (!c->is_in_flight) return;
    if (state_of(c) != GOES_ON) {
        land(c);
        c->library->news |= HAS_ENDED;
    } else if (c->has_news) {
        c->has_news = 0;
        c->library->news |= HAS_READY;
    }
}

/* One round: polls each call in flight but `except`, then runs the first kernel that can run. 0: nothing has moved. */
static int go_round(Library *mpi, const Call *except) {
    int moved = 0;
    mpi->rounds++;
    for (Call *c = mpi->in_flight, *next; c; c = next) {
        next = c->next;
        if (c == except) continue;
        moved |= poll(c);
        settle(c);
    }
    for (Call *c = mpi->in_flight; c; c = c->next) {
        if (c == except || !can_run(c)) continue;
        run_first(c);
        settle(c);
        return 1; /* the list may be another one now */
    }
    return moved;
}

/* Tells Python what it must know and might not see: nobody waits for these calls. */
static int has_to_tell(const Library *mpi) {
    return (mpi->news & HAS_ENDED && mpi->is_watched) || (mpi->news & HAS_READY && !mpi->taken);
}

static void tell(Library *mpi) {
    if (has_to_tell(mpi)) pthread_cond_signal(&mpi->told);
}

/* Gives the lock and the core to other threads: yields the core at first, later sleeps, but not past the end of a timed
 * kernel. */
static void rest(Call *c, long times) {
    double seconds = (times < 10 ? (double)times : 10.0) * c->library->nap;
    let_others(c->library);
    double t = c->n_timed ? now() : 0.0;
    for (int32_t k = 0; k < c->n_timed; k++) seconds = c->dues[c->timed[k]] - t < seconds ? c->dues[c->timed[k]] - t : seconds;
    if (state_of(c) != GOES_ON) return;
    unlock(c->library);
    if (times <= 0) sched_yield();
    else if (seconds > 0) sleep_for(seconds);
    lock(c->library);
}

/* 1: only `sized` goes on with the call, at once. */
static int awaits_rows(const Call *c) { return c->rows_op >= 0 && c->unfinished && c->n_python && c->python[0] == c->rows_op; }

/* Drives the call for `seconds`, or until it has made no progress for `stall` seconds. 0 seconds: one round.
 *
 * It ends early if Python has something to do. Other calls in flight go on meanwhile. If the call has not ended, it is in
 * flight.
 */
static int drive(Call *c, double seconds, double stall) {
    Library *mpi = c->library;
    double from = now(), t;
    long idle = 0;
    int state;
    mpi->waiting++;
    if (c->is_long) depart(c); /* the progress thread goes on with it while a kernel runs */
    while ((state = state_of(c)) == GOES_ON) {
        int moved = poll(c);
        mpi->rounds++;
        if (can_run(c)) {
            run_first(c);
            moved = 1;
        }
        if ((state = state_of(c)) != GOES_ON) break;
        if (c->n_python && !c->n_ready) {
            state = HAS_KERNELS;
            break;
        }
        if (moved) {
            idle = 0;
            if (seconds <= 0 || now() - from >= seconds) break;
            let_others(mpi);
            continue;
        }
        if (seconds <= 0 || mpi->news) break;
        if (mpi->in_flight) go_round(mpi, c);
        if (++idle <= c->spins) continue;
        rest(c, idle - c->spins - mpi->yields);
        t = now();
        if (t - (c->moved_at > from ? c->moved_at : from) > stall) {
            state = STALLED;
            break;
        }
        if (t - from >= seconds) break;
    }
    if (state_of(c) != GOES_ON) state = state_of(c); /* the progress thread may have ended it during the rest */
    if (state == FINISHED || state == FAILED || state == DISAGREES) {
        land(c);
        tell(mpi); /* Python polls no more for this call, and there may be news of others */
    } else if (!awaits_rows(c)) {
        depart(c);
        mpi->program = c->spins ? (pid_t)syscall(SYS_gettid) : 0;
    }
    mpi->waiting--;
    stir(mpi);
    return state;
}

/* ------------------------------------------------------------------------------------------------ the progress thread */

/* By default a thread that wakes waits until the slice of the running kernel has ended, 3 ms or more. Since Linux 6.12 one
 * with shorter slices does not. (sched_setattr(2); Documentation/scheduler/sched-eevdf.rst) */
static void request_short_slices(void) {
#ifdef SYS_sched_setattr
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
    } request = {sizeof request, SCHED_OTHER, 0, getpriority(PRIO_PROCESS, 0), 0, SLICE_NANOSECONDS, 0, 0};
    if (sched_getscheduler(0) == SCHED_OTHER) syscall(SYS_sched_setattr, 0, &request, 0);
#endif
}

static double until_next_poll(const Library *mpi) {
    double seconds = mpi->seconds, half = mpi->longest_forwarding / 2, rest;
    if (half > 0) { /* other ranks wait for the next message: poll in the middle of a kernel */
        half = half > least_pause(mpi) ? half : least_pause(mpi);
        seconds = half < seconds ? half : seconds;
    }
    rest = mpi->kernel_began + seconds - now(); /* there was a poll just before the kernel */
    return 0 < rest && rest < seconds ? rest : seconds;
}

/* 1: the thread that has left a call in flight sleeps. It may wait for the call in a way that does not poll, as torch does. */
static int program_sleeps(Library *mpi) {
    char text[256], *state;
    ssize_t n;
    if (!mpi->program) return 0;
    if (mpi->program != mpi->opened) {
        snprintf(text, sizeof text, "/proc/self/task/%d/stat", (int)mpi->program);
        if (mpi->opened) close(mpi->stat);
        mpi->stat = open(text, O_RDONLY | O_CLOEXEC);
        mpi->opened = mpi->program;
    }
    if (mpi->stat < 0 || (n = pread(mpi->stat, text, sizeof text - 1, 0)) <= 0) return 0;
    text[n] = 0;
    state = strrchr(text, ')'); /* behind the name: " S 1 ..." */
    return state != NULL && state[1] && state[2] == 'S';
}

/* As many parts as the messages in flight may have: as often can a poll that ends none of them have copied something. */
static int64_t parts_in_flight(const Library *mpi) {
    int64_t parts = 0;
    for (const Call *c = mpi->in_flight; c; c = c->next)
        for (int32_t k = 0; k < c->n_pending; k++) parts += c->ops[c->owners[k]].count / PART_NBYTES;
    return parts;
}

static void *run_thread(void *argument) {
    Library *mpi = argument;
    double busy_at = now(), moved_at = 0.0;
    int64_t copies = 0; /* long rounds since the last one that has moved something: no more than there are parts */
    request_short_slices();
    lock(mpi);
    while (!mpi->stops) {
        long seen = mpi->rounds;
        double spent = cpu_seconds();
        double pause = until_next_poll(mpi), t;
        if (mpi->in_flight && !mpi->waiting && pause > ASLEEP_SECONDS && program_sleeps(mpi)) pause = ASLEEP_SECONDS;
        unlock(mpi);
        sleep_for(pause);
        lock(mpi);
        t = now();
        if (has_rest(mpi)) {
            if (!mpi->in_flight) mpi->longest_forwarding = copies = 0;
            if (t - busy_at < (mpi->least == mpi->most ? mpi->linger : IDLE_SECONDS)) continue;
            mpi->sleeps = 1;
            while (has_rest(mpi) && !mpi->stops) pthread_cond_wait(&mpi->wake, &mpi->lock);
            mpi->sleeps = 0;
            mpi->seconds = least_pause(mpi);
            busy_at = now();
            continue;
        }
        busy_at = t;
        if (mpi->rounds != seen) continue; /* another thread polls */
        int moved = 0, rounds = 0;
        for (int silent = 0; silent < mpi->polls_per_wake && rounds < MOST_ROUNDS && !mpi->stops; rounds++) {
            double begun = now();
            int has_moved = go_round(mpi, NULL);
            moved |= has_moved;
            if (has_moved) silent = copies = 0;
            else if (now() - begun > COPY_SECONDS && copies < parts_in_flight(mpi)) silent = 0, copies++;
            else silent++;
            let_others(mpi);
        }
        if (rounds == MOST_ROUNDS) {
            mpi->seconds = least_pause(mpi);
            moved_at = now();
        } else if (moved) {
            t = now();
            double gap = (t - moved_at) / mpi->polls_per_message;
            mpi->seconds = gap < least_pause(mpi) ? least_pause(mpi) : gap > most_pause(mpi) ? most_pause(mpi) : gap;
            moved_at = t;
        } else {
            if (rounds == mpi->polls_per_wake) mpi->cost += (cpu_seconds() - spent - mpi->cost) / COST_WAKES; /* no copies */
            mpi->seconds = 1.5 * mpi->seconds < most_pause(mpi) ? 1.5 * mpi->seconds : most_pause(mpi);
        }
        tell(mpi);
    }
    unlock(mpi);
    return NULL;
}

/* ------------------------------------------------------------------------------------------------ Library */

static PyObject *library_new(PyTypeObject *type, PyObject *args, PyObject *options) {
    unsigned long long isend, issend, irecv, test, testsome;
    unsigned long long byte;
    Py_ssize_t request_nbytes;
    int yields, wake, message;
    double nap, linger;
    (void)options;
    if (!PyArg_ParseTuple(args, "KKKKKKn(iiidd)", &isend, &issend, &irecv, &test, &testsome, &byte, &request_nbytes, &yields,
                          &wake, &message, &nap, &linger))
        return NULL;
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
    self->yields = yields, self->polls_per_wake = wake, self->polls_per_message = message;
    self->nap = nap, self->linger = linger;
    self->process = getpid();
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_mutex_init(&self->lock, NULL);
    pthread_cond_init(&self->wake, &clock);
    pthread_cond_init(&self->told, &clock);
    pthread_cond_init(&self->idle, &clock);
    pthread_cond_init(&self->turn, &clock);
    pthread_condattr_destroy(&clock);
    return (PyObject *)self;
}

static void plain_free(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc release_memory = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release_memory(self);
    Py_DECREF(type);
}

static void stop_thread(Library *mpi) {
    if (mpi->process != getpid()) return; /* a fork has no thread */
    Py_BEGIN_ALLOW_THREADS
    lock(mpi);
    while (mpi->stops) pthread_cond_wait(&mpi->idle, &mpi->lock); /* another thread stops it: only one may join it */
    if (mpi->has_thread) {
        mpi->stops = mpi->is_woken = 1;
        pthread_cond_signal(&mpi->wake);
        pthread_cond_signal(&mpi->told);
        unlock(mpi);
        pthread_join(mpi->thread, NULL);
        lock(mpi);
        mpi->stops = 0;
        __atomic_store_n(&mpi->has_thread, 0, __ATOMIC_RELAXED);
        pthread_cond_broadcast(&mpi->idle);
    }
    unlock(mpi);
    Py_END_ALLOW_THREADS
}

static void library_free(PyObject *self) {
    stop_thread((Library *)self);
    plain_free(self);
}

static PyObject *library_poll(PyObject *self, PyObject *none) {
    Library *mpi = (Library *)self;
    int moved;
    (void)none;
    Py_BEGIN_ALLOW_THREADS
    lock(mpi);
    moved = go_round(mpi, NULL) ? MOVED : 0;
    moved |= mpi->news;
    mpi->news = 0;
    unlock(mpi);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(moved);
}

static PyObject *library_help(PyObject *self, PyObject *args) {
    Library *mpi = (Library *)self;
    double least, most;
    int failed = 0;
    if (!PyArg_ParseTuple(args, "dd", &least, &most)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    lock(mpi);
    while (mpi->stops) pthread_cond_wait(&mpi->idle, &mpi->lock);
    mpi->least = mpi->seconds = least;
    mpi->most = most;
    if (!mpi->has_thread) {
        sigset_t all, before; /* signals are for the threads of Python */
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        failed = pthread_create(&mpi->thread, NULL, run_thread, mpi);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        __atomic_store_n(&mpi->has_thread, !failed, __ATOMIC_RELAXED);
    }
    unlock(mpi);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(!failed);
}

static PyObject *library_stop(PyObject *self, PyObject *none) {
    (void)none;
    stop_thread((Library *)self);
    Py_RETURN_NONE;
}

static PyObject *library_rest(PyObject *self, PyObject *seconds) {
    Library *mpi = (Library *)self;
    double until = PyFloat_AsDouble(seconds);
    if (PyErr_Occurred()) return NULL;
    until += now();
    Py_BEGIN_ALLOW_THREADS
    lock(mpi);
    while (!mpi->is_woken && !has_to_tell(mpi) && now() < until) wait_until(&mpi->told, mpi, until);
    mpi->is_woken = 0;
    unlock(mpi);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *library_wake(PyObject *self, PyObject *none) {
    Library *mpi = (Library *)self;
    (void)none;
    PyThreadState *python = lock_with_gil(mpi);
    mpi->is_woken = 1;
    pthread_cond_signal(&mpi->told);
    unlock_with_gil(mpi, python);
    Py_RETURN_NONE;
}

static PyMethodDef library_methods[] = {
    {"poll", library_poll, METH_NOARGS,
     "One round of all calls in flight. 1: it has moved something; + 2: some call has ended; + 4: some has kernels for Python."},
    {"help", library_help, METH_VARARGS, "help(least, most): let a thread poll, with pauses from least to most seconds. False: there is none."},
    {"stop", library_stop, METH_NOARGS, "End the thread."},
    {"rest", library_rest, METH_O, "rest(seconds): wait until Python has something to do, or is woken, or the time is over."},
    {"wake", library_wake, METH_NOARGS, "End the `rest` of another thread, or the next one."},
    {NULL, NULL, 0, NULL},
};
static PyObject *library_has_thread(PyObject *self, void *none) {
    (void)none;
    return PyLong_FromLong(__atomic_load_n(&((Library *)self)->has_thread, __ATOMIC_RELAXED));
}

static int *library_field(Library *mpi, void *name) { return *(char *)name == 'n' ? &mpi->news : &mpi->is_watched; }

static PyObject *library_get(PyObject *self, void *name) {
    PyThreadState *python = lock_with_gil((Library *)self);
    int value = *library_field((Library *)self, name);
    unlock_with_gil((Library *)self, python);
    return PyLong_FromLong(value);
}

static int library_set(PyObject *self, PyObject *value, void *name) {
    long number = value == NULL ? 0 : PyLong_AsLong(value);
    if (number == -1 && PyErr_Occurred()) return -1;
    PyThreadState *python = lock_with_gil((Library *)self);
    *library_field((Library *)self, name) = (int)number;
    tell((Library *)self);
    unlock_with_gil((Library *)self, python);
    return 0;
}

static PyGetSetDef library_getset[] = {
    {"is_watched", library_get, library_set, "not 0: the thread ends `rest` when a call has ended", "is_watched"},
    {"has_thread", library_has_thread, NULL, "1 while a thread polls", NULL},
    {"news", library_get, library_set, "what `poll` would tell but for 1: while there is any, `Call.drive` returns at once", "news"},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot library_slots[] = {
    {Py_tp_new, library_new},
    {Py_tp_dealloc, library_free},
    {Py_tp_methods, library_methods},
    {Py_tp_getset, library_getset},
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

/* Notes which buffers this op uses. */
static void note_needs(Call *c, const Op *o) {
    int n = o->kind == KERNEL ? 3 : o->kind == CHECK || o->flags & CARRIED ? 2 : 1;
    for (int k = 0; o->kind != PYTHON && o->count && k < n; k++) c->needs[o->buffers[k]] = 1;
}

static int is_op(const Call *c, const Op *o) {
    if (o->kind == SEND || o->kind == RECV)
        return o->count >= 0 && o->count <= INT32_MAX && o->number >= 0 && o->peer >= 0 && is_inside(c, o, 0, o->count) &&
               (!(o->flags & CARRIED) || (o->kind == RECV && is_inside(c, o, 1, (int64_t)sizeof(int64_t) + o->count)));
    if (o->kind == PYTHON) return 1;
    if (o->kind == CHECK)
        return o->count >= 0 && o->number >= 0 && o->number <= o->divisor && o->divisor > 0 && o->count % o->divisor == 0 &&
               is_inside(c, o, 0, o->count) && is_inside(c, o, 1, o->count) &&
               (!(o->flags & AWAITS_ROWS) || o->divisor >= 4 * (int)sizeof(int64_t));
    if (o->kind != KERNEL || o->count < 0 || o->count > INT64_MAX / 32) return 0;
    for (int k = 0; k < 3; k++) {
        int64_t nbytes = kernel_nbytes(o->kernel, o->dtype, o->divisor, o->flags, k, o->count);
        if (nbytes < 0 || !is_inside(c, o, k, nbytes)) return 0;
    }
    return 1;
}

static const char *fault(Call *c, int32_t n_start, int32_t n_start_to, int32_t n_done, int32_t n_done_to) {
    int32_t n = c->n_ops, first = 0;
    for (int32_t i = 0; i < n; i++) {
        if (!is_op(c, &c->ops[i])) return "an op does not stay inside its buffers";
        note_needs(c, &c->ops[i]);
    }
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

/* C goes on with this call no more, once no kernel of it runs: one may run after the call has failed. Nobody else uses the
 * call: it is driven, or nobody has it. */
static void stay(Call *c) {
    Py_BEGIN_ALLOW_THREADS
    lock(c->library);
    c->stays = 1;
    while (c->n_running) pthread_cond_wait(&c->library->idle, &c->library->lock);
    c->stays = 0;
    land(c);
    c->library->taken -= c->n_taken;
    c->n_taken = 0;
    unlock(c->library);
    Py_END_ALLOW_THREADS
}

static void call_free(PyObject *object) {
    Call *c = (Call *)object;
    if (c->library && c->library->process == getpid()) stay(c);
    void *all[] = {c->ops, c->start_at, c->start_to, c->done_at, c->done_to, c->blockers_at_first, c->first, c->nbytes,
                   c->bases, c->needs, c->given, c->blocks, c->blockers, c->queue, c->ready, c->python, c->timed, c->dues, c->owners, c->indices, c->finished,
                   c->requests, c->statuses, c->begun};
    for (size_t k = 0; k < sizeof all / sizeof *all; k++) free(all[k]);
    Py_XDECREF((PyObject *)c->library);
    plain_free(object);
}

static PyObject *call_new(PyTypeObject *type, PyObject *args, PyObject *options) {
    PyObject *library, *ops, *edges[4], *blockers, *first, *nbytes;
    unsigned long long comm;
    int is_small, spins, is_long, forwards;
    int32_t counts[4], n_blockers = 0;
    (void)options;
    if (!PyArg_ParseTuple(args, "O!OOOOOOOOKpipp", library_type, &library, &ops, &edges[0], &edges[1], &edges[2],
                          &edges[3], &blockers, &first, &nbytes, &comm, &is_small, &spins, &is_long, &forwards))
        return NULL;
    allocfunc make = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Call *c = (Call *)make(type, 0);
    if (c == NULL) return NULL;
    Py_INCREF(library);
    c->library = (Library *)library;
    c->comm = (Handle)comm;
    c->is_small = is_small;
    c->spins = spins;
    c->is_long = is_long;
    c->forwards = forwards;
    c->rows_op = -1;
    int32_t **lists[] = {&c->start_at, &c->start_to, &c->done_at, &c->done_to};
    if ((c->ops = copied(ops, sizeof(Op), &c->n_ops)) == NULL) goto failed;
    for (int k = 0; k < 4; k++)
        if ((*lists[k] = copied(edges[k], sizeof(int32_t), &counts[k])) == NULL) goto failed;
    if ((c->blockers_at_first = copied(blockers, sizeof(int32_t), &n_blockers)) == NULL) goto failed;
    if ((c->first = copied(first, sizeof(int32_t), &c->n_first)) == NULL) goto failed;
    if ((c->nbytes = copied(nbytes, sizeof(int64_t), &c->n_buffers)) == NULL) goto failed;
    for (int32_t i = 0; i < c->n_ops; i++) {
        c->n_messages += c->ops[i].kind == SEND || c->ops[i].kind == RECV;
        c->n_python_ops += c->ops[i].kind == PYTHON;
        if (c->ops[i].kind == CHECK && c->ops[i].flags & AWAITS_ROWS) c->rows_op = i;
    }
    size_t n = (size_t)c->n_ops + 1, m = (size_t)c->n_messages + 1;
    c->blockers = calloc(n, sizeof(int32_t));
    c->queue = calloc(n, sizeof(int32_t));
    c->ready = calloc(n, sizeof(int32_t));
    c->python = calloc(n, sizeof(int32_t));
    c->timed = calloc(n, sizeof(int32_t));
    c->dues = calloc(n, sizeof(double));
    c->owners = calloc(m, sizeof(int32_t));
    c->indices = calloc(m, sizeof(int32_t));
    c->finished = calloc(m, sizeof(int32_t));
    c->requests = calloc(m, MOST_REQUEST_NBYTES);
    c->statuses = calloc(m, STATUS_NBYTES);
    c->begun = calloc(2 * n, sizeof(double));
    c->bases = calloc((size_t)c->n_buffers + 1, sizeof(char *));
    c->needs = calloc((size_t)c->n_buffers + 1, 1);
    if (!c->blockers || !c->queue || !c->ready || !c->python || !c->timed || !c->dues || !c->owners || !c->indices || !c->finished || !c->requests ||
        !c->statuses || !c->begun || !c->bases || !c->needs) {
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

static int refuse_if_unfinished(const Call *c) {
    if (refuse_if_driven(c)) return 1; /* first: who drives it writes `unfinished` */
    int is_unfinished = __atomic_load_n(&c->is_in_flight, __ATOMIC_ACQUIRE) || c->unfinished; /* in this order */
    if (is_unfinished) PyErr_SetString(PyExc_RuntimeError, "the last call is not finished");
    return is_unfinished;
}

static int refuse_if_unplaced(const Call *c) {
    if (c->is_unsized) {
        PyErr_SetString(PyExc_ValueError, "its rows do not fit");
        return 1;
    }
    for (int32_t k = 0; k < c->n_buffers; k++) {
        if (!c->needs[k] || c->bases[k]) continue;
        PyErr_Format(PyExc_ValueError, "buffer %d has no address", (int)k);
        return 1;
    }
    return 0;
}

static PyObject *call_place(PyObject *self, PyObject *addresses) {
    Call *c = (Call *)self;
    Py_buffer view;
    if (refuse_if_unfinished(c) || PyObject_GetBuffer(addresses, &view, PyBUF_SIMPLE) < 0) return NULL;
    int fits = view.len == (Py_ssize_t)(c->n_buffers * sizeof(char *));
    if (fits) memcpy(c->bases, view.buf, (size_t)view.len);
    PyBuffer_Release(&view);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "each buffer has one address");
        return NULL;
    }
    Py_RETURN_NONE;
}

/* The call begins anew. The lock is held. */
static void reset(Call *c, int tag) {
    memcpy(c->blockers, c->blockers_at_first, (size_t)c->n_ops * sizeof(int32_t));
    memcpy(c->queue, c->first, (size_t)c->n_first * sizeof(int32_t));
    memset(c->begun, 0, 2 * (size_t)c->n_ops * sizeof(double));
    if (c->n_python_ops) memset(c->dues, 0, (size_t)c->n_ops * sizeof(double));
    c->head = c->n_ready = c->n_python = c->n_timed = c->n_taken = c->has_news = c->n_pending = c->error = c->disagrees = 0;
    c->tail = c->n_first;
    c->unfinished = c->n_ops;
    if (c->rows_op >= 0) c->is_long = 0; /* its rows are unknown */
    c->tag = tag;
    c->started = c->moved_at = now();
}

/* Lets these ops wait for one more event, which `release` is. The lock is held. False: there is no such op. */
static int hold(Call *c, const int32_t *held, int32_t n) {
    int is_right = 1;
    for (int32_t k = 0; k < n; k++) is_right &= held[k] >= 0 && held[k] < c->n_ops;
    for (int32_t k = 0; is_right && k < n; k++) c->blockers[held[k]]++;
    c->tail = 0;
    for (int32_t k = 0; k < c->n_first; k++)
        if (!c->blockers[c->first[k]]) c->queue[c->tail++] = c->first[k];
    if (!is_right) c->unfinished = 0;
    return is_right;
}

/* Goes on with the call, or begins it with this tag, without these ops. Other threads may ask for its state meanwhile. */
static PyObject *driven(Call *c, const int *tag, const int32_t *held, int32_t n, double seconds, double stall) {
    int state = FAILED, is_right = 1;
    c->is_driven = 1;
    Py_BEGIN_ALLOW_THREADS
    lock(c->library);
    if (tag != NULL) reset(c, *tag);
    if (held != NULL) is_right = hold(c, held, n);
    if (is_right) {
        start_ops(c);
        state = drive(c, seconds, stall);
    }
    unlock(c->library);
    Py_END_ALLOW_THREADS
    c->is_driven = 0;
    if (is_right) return PyLong_FromLong(state);
    PyErr_SetString(PyExc_IndexError, "there is no such op");
    return NULL;
}

static PyObject *call_run(PyObject *self, PyObject *args) {
    Call *c = (Call *)self;
    PyObject *held = NULL;
    double seconds, stall;
    int tag;
    if (!PyArg_ParseTuple(args, "idd|O", &tag, &seconds, &stall, &held) || refuse_if_unfinished(c) || refuse_if_unplaced(c))
        return NULL;
    int32_t *ops = NULL, n = 0;
    if (held != NULL && (ops = copied(held, sizeof(int32_t), &n)) == NULL) return NULL;
    PyObject *state = driven(c, &tag, ops, n, seconds, stall);
    free(ops);
    return state;
}

/* These ops wait for one event less. */
static PyObject *call_release(PyObject *self, PyObject *ops) {
    Call *c = (Call *)self;
    int32_t *freed, n;
    if ((freed = copied(ops, sizeof(int32_t), &n)) == NULL) return NULL;
    PyThreadState *python = lock_with_gil(c->library);
    int is_right = c->unfinished > 0; /* it is not exported */
    for (int32_t k = 0; k < n; k++) is_right &= freed[k] >= 0 && freed[k] < c->n_ops && c->blockers[freed[k]] > 0;
    for (int32_t k = 0; is_right && k < n; k++)
        if (--c->blockers[freed[k]] == 0) c->queue[c->tail++] = freed[k];
    if (is_right) {
        start_ops(c);
        settle(c);
        tell(c->library);
    }
    unlock_with_gil(c->library, python);
    free(freed);
    if (is_right) Py_RETURN_NONE;
    PyErr_SetString(PyExc_IndexError, "there is no such op, or it waits for nothing");
    return NULL;
}

/* A kernel of Python that can run: sums and copies first, then the order of the program. -1: there is none. */
static PyObject *call_take(PyObject *self, PyObject *merges_only) {
    Call *c = (Call *)self;
    Library *mpi = c->library;
    int only = PyObject_IsTrue(merges_only);
    int32_t i = -1;
    if (only < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS
    lock(mpi);
    if (c->is_long && c->n_python)
        for (int silent = 0, rounds = 0; silent < mpi->polls_per_wake && rounds < MOST_ROUNDS; rounds++) {
            silent += !go_round(mpi, NULL); /* during this kernel there may be no poll for a long time */
            let_others(mpi);
        }
    int32_t at = c->n_python - 1;
    while (at >= 0 && !(c->ops[c->python[at]].flags & MERGE)) at--;
    if (at < 0 && !only) at = c->n_python - 1;
    if (at >= 0 && state_of(c) == GOES_ON && !c->stays) {
        i = c->python[at];
        for (c->n_python--; at < c->n_python; at++) c->python[at] = c->python[at + 1];
        c->begun[i] = mpi->kernel_began = now();
        c->n_taken++;
        mpi->taken++;
    }
    unlock(mpi);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(i);
}

/* True if Python has taken this kernel, and has not given it back. The lock is held. */
static int is_taken(const Call *c, int i) {
    return i >= 0 && i < c->n_ops && c->ops[i].kind == PYTHON && c->begun[i] && !c->ended[i] && !c->dues[i] && c->n_taken;
}

/* Python has run a kernel, or has launched one that ends when it is `due`, if that is not 0. Returns the state, or -1. The
 * lock is held. */
static int take_back(Call *c, int i, double begun, double due) {
    int state;
    if (!is_taken(c, i)) return -1;
    c->n_taken--;
    c->library->taken--;
    c->begun[i] = begun;
    if (due) {
        c->dues[i] = due;
        c->timed[c->n_timed++] = i;
        release(c, c->start_at, c->start_to, i);
        start_ops(c);
    } else {
        ran(c, i);
        if (c->forwards && c->ended[i] - begun > c->library->longest_forwarding)
            c->library->longest_forwarding = c->ended[i] - begun;
    }
    state = state_of(c);
    if (state != GOES_ON) land(c);
    else if (c->n_python) state = HAS_KERNELS;
    return state;
}

static PyObject *given_back(Call *c, int i, double begun, double due) {
    int state;
    Py_BEGIN_ALLOW_THREADS
    lock(c->library);
    state = take_back(c, i, begun, due);
    unlock(c->library);
    Py_END_ALLOW_THREADS
    if (state >= 0) return PyLong_FromLong(state);
    PyErr_SetString(PyExc_IndexError, "no such kernel runs");
    return NULL;
}

static PyObject *call_ran(PyObject *self, PyObject *args) {
    double begun;
    int i;
    return PyArg_ParseTuple(args, "id", &i, &begun) ? given_back((Call *)self, i, begun, 0.0) : NULL;
}

static PyObject *call_launched(PyObject *self, PyObject *args) {
    double begun, due;
    int i;
    return PyArg_ParseTuple(args, "idd", &i, &begun, &due) ? given_back((Call *)self, i, begun, due) : NULL;
}

/* Which buffers `run_on` places, and how many of the last buffers have a stamp, and every how many bytes. */
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
    for (int k = 1; k <= n_stamped; k++) c->needs[c->n_buffers - k] = 1;
    Py_RETURN_NONE;
}

/* Notes how many starts there are. 0: a block is none. */
static int are_blocks(Call *c) {
    c->n_starts = 0;
    for (int32_t k = 0; k < c->n_buffers; k++) {
        int32_t end = c->blocks[c->n_ops + k].first[0];
        if (end < 0 || end == INT32_MAX || c->blocks[c->n_ops + k].width[0] < 0) return 0;
        if (end >= c->n_starts) c->n_starts = end + 1;
    }
    for (int32_t i = 0; i < c->n_ops; i++)
        for (int k = 0; k < 3; k++) {
            const Blocks *b = &c->blocks[i];
            if (b->first[k] < 0 || b->first[k] > b->last[k] || b->last[k] >= c->n_starts || b->size[k] < 0 || b->width[k] < 0)
                return 0;
        }
    return 1;
}

static PyObject *call_resizable(PyObject *self, PyObject *args) {
    Call *c = (Call *)self;
    PyObject *blocks;
    int32_t n;
    long long small, most;
    if (!PyArg_ParseTuple(args, "OLL", &blocks, &small, &most) || refuse_if_unfinished(c)) return NULL;
    free(c->blocks);
    if ((c->blocks = copied(blocks, sizeof(Blocks), &n)) == NULL) return NULL;
    c->small_nbytes = small, c->most_nbytes = most;
    if (n == c->n_ops + c->n_buffers && are_blocks(c)) Py_RETURN_NONE;
    free(c->blocks);
    c->blocks = NULL;
    PyErr_SetString(PyExc_ValueError, "a block is none of these starts");
    return NULL;
}

/* The offsets, the count and the flags of an op for these rows. 0: C does not know such an op. */
static int resize_op(const Call *c, Op *o, const Blocks *b, const int64_t *starts) {
    int n = o->kind == KERNEL ? 3 : o->kind == SEND || o->kind == RECV ? 1 : 0, is_counted = 0;
    for (int k = 0; k < n; k++) {
        int64_t nbytes;
        if (!b->first[k]) continue;
        if (__builtin_mul_overflow(starts[b->first[k]], b->width[k], &o->offsets[k])) return 0;
        if (__builtin_mul_overflow(starts[b->last[k]] - starts[b->first[k]], b->width[k], &nbytes)) return 0;
        if (!b->size[k]) continue;
        if (is_counted && nbytes / b->size[k] != o->count) return 0;
        o->count = nbytes / b->size[k];
        is_counted = 1;
    }
    if (is_counted && o->kind == SEND) o->flags = b->flags[o->count > c->small_nbytes];
    return (n != 1 || o->count <= c->most_nbytes) && is_op(c, o);
}

static int resize(Call *c, const int64_t *starts) {
    const Blocks *of_buffers = c->blocks + c->n_ops;
    for (int32_t k = 0; k < c->n_buffers; k++)
        if (of_buffers[k].first[0] && __builtin_mul_overflow(starts[of_buffers[k].first[0]], of_buffers[k].width[0], &c->nbytes[k]))
            return 0;
    memset(c->needs, 0, (size_t)c->n_buffers);
    for (int32_t i = 0; i < c->n_ops; i++) {
        if (!resize_op(c, &c->ops[i], &c->blocks[i], starts)) return 0;
        note_needs(c, &c->ops[i]);
    }
    return 1;
}

/* `is_unsized` says whether the rows fit. 0: an error is set. */
static int resized(Call *c, PyObject *starts, int is_small, int is_long) {
    Py_buffer view;
    if (PyObject_GetBuffer(starts, &view, PyBUF_SIMPLE) < 0) return 0;
    int is_right = c->blocks != NULL && view.len == (Py_ssize_t)(c->n_starts * sizeof(int64_t));
    if (is_right) {
        c->is_small = is_small, c->is_long = is_long;
        c->is_unsized = !resize(c, view.buf);
    } else {
        PyErr_SetString(PyExc_ValueError, "each block has one start");
    }
    PyBuffer_Release(&view);
    return is_right;
}

static PyObject *call_resize(PyObject *self, PyObject *args) {
    Call *c = (Call *)self;
    PyObject *starts;
    int is_small, is_long;
    if (!PyArg_ParseTuple(args, "Opp", &starts, &is_small, &is_long) || refuse_if_unfinished(c)) return NULL;
    return resized(c, starts, is_small, is_long) ? PyBool_FromLong(!c->is_unsized) : NULL;
}

/* Where the buffers of `form` are. 0: an error is set. */
static int place_given(Call *c, PyObject *addresses) {
    if (PyTuple_Size(addresses) != c->n_given) {
        PyErr_SetString(PyExc_ValueError, "each given buffer has one address");
        return 0;
    }
    for (int32_t k = 0; k < c->n_given; k++) {
        c->bases[c->given[k]] = (char *)PyLong_AsVoidPtr(PyTuple_GetItem(addresses, k));
        if (PyErr_Occurred()) return 0;
    }
    return 1;
}

static PyObject *call_run_on(PyObject *self, PyObject *args) {
    Call *c = (Call *)self;
    PyObject *addresses;
    double seconds, stall;
    long long stamp;
    int tag;
    if (!PyArg_ParseTuple(args, "iddLO!", &tag, &seconds, &stall, &stamp, &PyTuple_Type, &addresses)) return NULL;
    if (refuse_if_unfinished(c) || !place_given(c, addresses) || (c->rows_op < 0 && refuse_if_unplaced(c))) return NULL;
    for (int k = 1; k <= c->n_stamped; k++)
        for (int64_t at = 0; at < c->nbytes[c->n_buffers - k]; at += c->stamped_every)
            memcpy(c->bases[c->n_buffers - k] + at, &stamp, sizeof(int64_t));
    return driven(c, &tag, NULL, 0, seconds, stall);
}

static PyObject *call_sized(PyObject *self, PyObject *args) {
    Call *c = (Call *)self;
    PyObject *starts, *addresses;
    double seconds, stall;
    int is_small, is_long;
    if (!PyArg_ParseTuple(args, "OppO!dd", &starts, &is_small, &is_long, &PyTuple_Type, &addresses, &seconds, &stall)) return NULL;
    if (refuse_if_driven(c)) return NULL;
    if (!awaits_rows(c)) {
        PyErr_SetString(PyExc_RuntimeError, "the call does not wait for its rows");
        return NULL;
    }
    if (!resized(c, starts, is_small, is_long) || !place_given(c, addresses)) return NULL;
    if (c->is_unsized) return PyLong_FromLong(HAS_KERNELS);
    if (refuse_if_unplaced(c)) return NULL;
    c->n_python = 0;
    c->begun[c->rows_op] = now();
    complete(c, c->rows_op); /* it is not in flight: no other thread knows it */
    return driven(c, NULL, NULL, 0, seconds, stall);
}

static PyObject *call_drive(PyObject *self, PyObject *args) {
    Call *c = (Call *)self;
    double seconds, stall;
    if (!PyArg_ParseTuple(args, "dd", &seconds, &stall) || refuse_if_driven(c)) return NULL;
    return driven(c, NULL, NULL, 0, seconds, stall);
}

static PyObject *call_has_ended(PyObject *self, PyObject *number) {
    Call *c = (Call *)self;
    long i = PyLong_AsLong(number);
    if (i == -1 && PyErr_Occurred()) return NULL;
    if (i < 0 || i >= c->n_ops) {
        PyErr_SetString(PyExc_IndexError, "there is no such op");
        return NULL;
    }
    double ended;
    __atomic_load(&c->ended[i], &ended, __ATOMIC_ACQUIRE); /* what it wrote can be read then */
    return PyBool_FromLong(ended != 0.0);
}

static PyObject *call_state(PyObject *self, void *none) {
    Call *c = (Call *)self;
    (void)none;
    PyThreadState *python = lock_with_gil(c->library);
    int state = state_of(c);
    if (state == GOES_ON && c->n_python) state = HAS_KERNELS;
    unlock_with_gil(c->library, python);
    return PyLong_FromLong(state);
}

static PyObject *call_times(PyObject *self, PyObject *none) {
    Call *c = (Call *)self;
    (void)none;
    size_t nbytes = 2 * (size_t)c->n_ops * sizeof(double);
    PyObject *times = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)nbytes);
    char *to = times == NULL ? NULL : PyBytes_AsString(times);
    if (to == NULL) return NULL;
    PyThreadState *python = lock_with_gil(c->library);
    memcpy(to, c->begun, nbytes);
    unlock_with_gil(c->library, python);
    return times;
}

static PyObject *call_moved_at(PyObject *self, void *none) {
    double t;
    (void)none;
    __atomic_load(&((Call *)self)->moved_at, &t, __ATOMIC_RELAXED);
    return PyFloat_FromDouble(t);
}

static PyObject *call_number(PyObject *self, void *name) {
    Call *c = (Call *)self;
    PyThreadState *python = lock_with_gil(c->library);
    long value = *(char *)name == 'u' ? c->unfinished : *(char *)name == 'd' ? c->disagrees : c->error;
    unlock_with_gil(c->library, python);
    return PyLong_FromLong(value);
}

static PyObject *call_export(PyObject *self, PyObject *none) {
    Call *c = (Call *)self;
    Py_ssize_t size = c->library->request_nbytes;
    (void)none;
    if (refuse_if_driven(c)) return NULL;
    c->is_driven = 1;
    stay(c);
    c->is_driven = 0;
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
    c->n_pending = c->unfinished = 0;
    return Py_BuildValue("y#NN", (char *)c->blockers, (Py_ssize_t)((size_t)c->n_ops * sizeof(int32_t)),
                         call_times(self, NULL), requests);
}

static PyMethodDef call_methods[] = {
    {"place", call_place, METH_O, "place(addresses): where the buffers are, 64 bits each."},
    {"run", call_run, METH_VARARGS, "run(tag, seconds, stall, held=()): begin a call, and drive it. If it has not ended then, it is in "
                                    "flight. Each op of `held` waits for one more event: `release`."},
    {"release", call_release, METH_O, "release(ops): these ops wait for one event less. What can start does, and nothing is driven."},
    {"take", call_take, METH_O, "take(merges_only): a kernel that Python must run now, and that was ready; -1: there is none."},
    {"ran", call_ran, METH_VARARGS, "ran(op, begun): this kernel has run. Returns the state."},
    {"launched", call_launched, METH_VARARGS, "launched(op, begun, due): this kernel will be done when it is due. Returns the state."},
    {"has_ended", call_has_ended, METH_O, "has_ended(op): True once this op is done."},
    {"form", call_form, METH_VARARGS, "form(given, n, nbytes): `run_on` places the buffers of these numbers, and writes "
                                      "the stamp into the last n buffers, once in every `nbytes`."},
    {"run_on", call_run_on, METH_VARARGS, "run_on(tag, seconds, stall, stamp, addresses): `run` on other memory."},
    {"resizable", call_resizable, METH_VARARGS, "resizable(blocks, small, most): how ops, then buffers, follow from the first "
                                                "rows of blocks. A message has at most `most` bytes."},
    {"resize", call_resize, METH_VARARGS, "resize(starts, is_small, is_long): the next calls have these rows. False: C cannot do that."},
    {"sized", call_sized, METH_VARARGS, "sized(starts, is_small, is_long, addresses, seconds, stall): the call that waits for its "
                                        "rows has these, on memory as in `run_on`. Returns the state: HAS_KERNELS if C cannot do that."},
    {"drive", call_drive, METH_VARARGS, "drive(seconds, stall): go on with the call. 0 seconds: one round."},
    {"times", call_times, METH_NOARGS, "When each op began, then when each op ended, as doubles of perf_counter."},
    {"export", call_export, METH_NOARGS, "(blockers, times, [(request, op)]): C goes on with this call no more."},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef call_members[] = {
    {"started", T_DOUBLE, offsetof(Call, started), READONLY, "when the last call began"},
    {"has_kernels", T_INT, offsetof(Call, n_python_ops), READONLY, "how many of its ops are kernels of Python"},
    {NULL, 0, 0, 0, NULL},
};
static PyGetSetDef call_getset[] = {
    {"state", call_state, NULL, "0: finished; 1: it goes on; 3: MPI has failed; 4: a CHECK has found a difference; 5: it has "
                                "kernels for Python", NULL},
    {"moved_at", call_moved_at, NULL, "when it last made progress", NULL},
    {"unfinished", call_number, NULL, "how many ops are not done", "unfinished"},
    {"disagrees", call_number, NULL, "1 if a CHECK has found a difference", "disagrees"},
    {"error", call_number, NULL, "the error code of MPI, or 0", "error"},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyType_Slot call_slots[] = {
    {Py_tp_new, call_new},
    {Py_tp_dealloc, call_free},
    {Py_tp_methods, call_methods},
    {Py_tp_members, call_members},
    {Py_tp_getset, call_getset},
    {Py_tp_doc, "A plan of one rank as a table of ops: Call(library, ops, start_at, start_to, done_at, done_to, blockers, "
                "first, nbytes of the buffers, communicator, is_small, spins, is_long, forwards)."},
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
    if (kernel_nbytes(kernel, dtype, divisor, flags, 0, 1) < 0) {
        PyErr_SetString(PyExc_ValueError, "there is no such kernel");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    if (count > 0) compute(kernel, dtype, divisor, flags, (char *)(uintptr_t)a, (char *)(uintptr_t)b, (char *)(uintptr_t)c, count);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* The same. */
static PyObject *run_product(PyObject *self, PyObject *args) {
    int is_wide, adds;
    long long m, n, k, leaves, x_step, x_across, w_step, w_across, y_step;
    unsigned long long x, w, bias, y, scratch;
    (void)self;
    if (!PyArg_ParseTuple(args, "ii(LLLL)(KLL)(KLL)K(KL)K", &is_wide, &adds, &m, &n, &k, &leaves, &x, &x_step, &x_across, &w,
                          &w_step, &w_across, &bias, &y, &y_step, &scratch))
        return NULL;
    if (m < 0 || n < 0 || k < 0 || leaves < 1 || k % leaves) {
        PyErr_SetString(PyExc_ValueError, "there is no such product");
        return NULL;
    }
    Product product = {m, n, k, leaves, (void *)(uintptr_t)x, x_step, x_across, (void *)(uintptr_t)w, w_step, w_across,
                       (void *)(uintptr_t)bias, (void *)(uintptr_t)y, y_step, adds};
    Py_BEGIN_ALLOW_THREADS
    chain_run(is_wide, &product, (void *)(uintptr_t)scratch);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *product_scratch(PyObject *self, PyObject *args) {
    int is_wide;
    long long m, n, k, leaves;
    (void)self;
    if (!PyArg_ParseTuple(args, "i(LLLL)", &is_wide, &m, &n, &k, &leaves)) return NULL;
    return PyLong_FromLongLong(chain_scratch(is_wide, m, n, k, leaves));
}

static PyMethodDef functions[] = {
    {"product", run_product, METH_VARARGS,
     "product(is_wide, adds, (m, n, k, leaves), (x, step, across), (w, step, across), bias, (y, step), scratch): see chain.h."},
    {"product_scratch", product_scratch, METH_VARARGS, "product_scratch(is_wide, (m, n, k, leaves)): the bytes of its scratch."},
    {"kernel", run_one_kernel, METH_VARARGS, "kernel(kernel, dtype, divisor, flags, a, b, c, count): one kernel on memory at these addresses."},
    {"xla_handler", xla_handler, METH_VARARGS, "xla_handler(run, major, minor): the address of the handler of calls in JAX programs."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "fompi.native._native", "Calls in C.", -1, functions, NULL, NULL, NULL, NULL};

#define NUMBER(name) {#name, name}
static const struct { const char *name; long value; } numbers[] = { /* for `fompi.native.numbers` */
    {"OP_NBYTES", (long)sizeof(Op)},
    {"BLOCKS_NBYTES", (long)sizeof(Blocks)},
    NUMBER(SEND), NUMBER(RECV), NUMBER(KERNEL), NUMBER(CHECK), NUMBER(PYTHON),
    NUMBER(SYNCHRONOUS), NUMBER(TESTED), NUMBER(ABSOLUTE), NUMBER(CARRIED), NUMBER(MERGE), NUMBER(AWAITS_ROWS), NUMBER(ROWS_BITS),
    NUMBER(FINISHED), NUMBER(GOES_ON), NUMBER(STALLED), NUMBER(FAILED), NUMBER(DISAGREES), NUMBER(HAS_KERNELS),
    NUMBER(MOVED), NUMBER(HAS_ENDED), NUMBER(HAS_READY),
    NUMBER(COPY), NUMBER(ADD), NUMBER(PROD), NUMBER(MEAN), NUMBER(MAX), NUMBER(MIN),
    NUMBER(ENCODE), NUMBER(DECODE), NUMBER(DECODE_ADD),
    NUMBER(BYTE), NUMBER(FLOAT32), NUMBER(FLOAT64), NUMBER(BFLOAT16), NUMBER(FLOAT16), NUMBER(COMPLEX64), NUMBER(COMPLEX128),
    NUMBER(UINT8), NUMBER(UINT16), NUMBER(UINT32), NUMBER(UINT64), NUMBER(INT8), NUMBER(INT16), NUMBER(INT32), NUMBER(INT64),
    NUMBER(WIRE_BFLOAT16), NUMBER(WIRE_FLOAT16), NUMBER(WIRE_INT8), NUMBER(WIRE_FP8), NUMBER(WIRE_INT4),
};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *made = PyModule_Create(&module);
    compute = kernel_for_processor();
    if (made == NULL) return NULL;
    library_type = PyType_FromSpec(&library_spec);
    call_type = PyType_FromSpec(&call_spec);
    PyObject *worker_type = ucx_worker_type();
    int is_full = worker_type != NULL && PyModule_AddObjectRef(made, "Worker", worker_type) >= 0;
    Py_XDECREF(worker_type);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        is_full = is_full && PyModule_AddIntConstant(made, numbers[i].name, numbers[i].value) >= 0;
    if (library_type == NULL || call_type == NULL || PyModule_AddObjectRef(made, "Library", library_type) < 0 ||
        PyModule_AddObjectRef(made, "Call", call_type) < 0 || !is_full) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
