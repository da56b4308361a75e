/* A stand-in for MPI that sends nothing. Each function takes some nanoseconds, and `Test` says what the test has set. */
#include <stdint.h>
#include <time.h>

long nanoseconds, tests; /* of each function; how many requests were asked for */
int is_done, failure;      /* 1: each `Test` ends its request, or one of them; what the functions return */

#define GET(x) __atomic_load_n(&x, __ATOMIC_RELAXED)

static int spend(void) {
    struct timespec from, t;
    clock_gettime(CLOCK_MONOTONIC, &from);
    do clock_gettime(CLOCK_MONOTONIC, &t);
    while ((t.tv_sec - from.tv_sec) * 1000000000L + t.tv_nsec - from.tv_nsec < GET(nanoseconds));
    return GET(failure);
}

int isend(const void *data, int count, intptr_t kind, int peer, int tag, intptr_t comm, void *request) {
    (void)data, (void)count, (void)kind, (void)peer, (void)tag, (void)comm;
    *(int64_t *)request = 1;
    return spend();
}

int irecv(void *data, int count, intptr_t kind, int peer, int tag, intptr_t comm, void *request) {
    return isend(data, count, kind, peer, tag, comm, request);
}

int test(void *request, int *flag, void *status) {
    (void)request, (void)status;
    __atomic_add_fetch(&tests, 1, __ATOMIC_RELAXED);
    *flag = GET(is_done);
    return spend();
}

int testsome(int count, void *requests, int *n, int *indices, void *statuses) {
    (void)count, (void)requests, (void)statuses;
    indices[0] = 0;
    return test(requests, n, statuses);
}
