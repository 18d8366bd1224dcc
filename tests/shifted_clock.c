/* Preloaded into a process of a test: its wall clock is off by the seconds in the file that LAGOON_TEST_CLOCK names.
   Monotonic clocks stay, as they do where somebody sets a machine's clock. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *shift;

__attribute__((constructor)) static void open_shift(void) {
    const char *path = getenv("LAGOON_TEST_CLOCK");
    int file = path ? open(path, O_RDONLY) : -1;
    if (file < 0) return;
    void *map = mmap(NULL, sizeof *shift, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (map != MAP_FAILED) shift = map;
}

/* Kafka's client hands wall-clock deadlines to the kernel, whose clock is not shifted: it keeps the real one. */
static int is_shifted(void *caller) {
    static __thread void *known;
    static __thread int answer;
    if (caller != known) {
        Dl_info info;
        answer = !(dladdr(caller, &info) && info.dli_fname && strstr(info.dli_fname, "rdkafka"));
        known = caller;
    }
    return answer;
}

int clock_gettime(clockid_t clock, struct timespec *out) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, out);
    int is_wall = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
    if (!status && shift && is_wall && is_shifted(__builtin_return_address(0))) out->tv_sec += *shift;
    return status;
}

int gettimeofday(struct timeval *restrict out, void *restrict zone) {
    struct timespec now;
    (void)zone;
    int status = clock_gettime(CLOCK_REALTIME, &now);
    if (shift && !is_shifted(__builtin_return_address(0))) now.tv_sec -= *shift;
    out->tv_sec = now.tv_sec;
    out->tv_usec = now.tv_nsec / 1000;
    return status;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
