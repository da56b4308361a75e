/* A stand-in for MPI that sends nothing. Each function takes some nanoseconds, and `Test` says what the test has set. */
#include <stdint.h>
#include <time.h>

long nanoseconds, tests; /* of each function; how many requests were asked for */
int done_below, failure; /* messages with smaller tags are done when they are tested; what the functions return */

int holds, held;         /* 1: functions wait; one of them waits */
long tests_at_mark;      /* as many `tests` there were before a message with the tag MARK began */

#define MARK 100
#define GET(x) __atomic_load_n(&x, __ATOMIC_RELAXED)

static int spend(void) {
    for (; GET(holds); __atomic_store_n(&held, 1, __ATOMIC_RELAXED)) {}
    __atomic_store_n(&held, 0, __ATOMIC_RELAXED);
    struct timespec from, t;
    clock_gettime(CLOCK_MONOTONIC, &from);
    do clock_gettime(CLOCK_MONOTONIC, &t);
    while ((t.tv_sec - from.tv_sec) * 1000000000L + t.tv_nsec - from.tv_nsec < GET(nanoseconds));
    return GET(failure);
}

int isend(const void *data, int count, intptr_t kind, int peer, int tag, intptr_t comm, void *request) {
    (void)data, (void)count, (void)kind, (void)peer, (void)comm;
    *(int64_t *)request = tag;
    if (tag == MARK) __atomic_store_n(&tests_at_mark, GET(tests), __ATOMIC_RELAXED);
    return spend();
}

int irecv(void *data, int count, intptr_t kind, int peer, int tag, intptr_t comm, void *request) {
    return isend(data, count, kind, peer, tag, comm, request);
}

int testsome(int count, void *requests, int *n, int *indices, void *statuses) {
    (void)statuses;
    __atomic_add_fetch(&tests, 1, __ATOMIC_RELAXED);
    *n = 0;
    for (int i = 0; i < count; i++)
        if (((int64_t *)requests)[i] < GET(done_below)) indices[(*n)++] = i;
    return spend();
}

int test(void *request, int *flag, void *status) {
    int at;
    return testsome(1, request, flag, &at, status);
}

/* Lets functions go on, and waits for some milliseconds: with the GIL, if Python calls it so. */
void go_on(int milliseconds) {
    struct timespec t = {0, milliseconds * 1000000L};
    __atomic_store_n(&holds, 0, __ATOMIC_RELAXED);
    nanosleep(&t, NULL);
}
