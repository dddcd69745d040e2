/*
 * Shifts the wall clock of one process, by LD_PRELOAD: the file that WALL_CLOCK_SHIFT names holds the
 * seconds, as a 64-bit number, and may change at any time. All other clocks are left alone.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long *shift;

__attribute__((constructor)) static void find_shift(void) {
    const char *path = getenv("WALL_CLOCK_SHIFT");
    int file = path ? open(path, O_RDONLY) : -1;
    void *page = file < 0 ? MAP_FAILED : mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    if (page == MAP_FAILED) _exit(70);
    shift = page;
}

static long seconds(void) { return shift ? *shift : 0; }

int clock_gettime(clockid_t clock, struct timespec *at) {
    long failed = syscall(SYS_clock_gettime, clock, at);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += seconds();
    return (int)failed;
}

int gettimeofday(struct timeval *at, void *zone) {
    long failed = syscall(SYS_gettimeofday, at, zone);
    if (!failed && at) at->tv_sec += seconds();
    return (int)failed;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
