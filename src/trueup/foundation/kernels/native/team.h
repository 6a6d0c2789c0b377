/* Several threads, without starting any: the OpenMP team that the process has already.
 *
 * PyTorch loads its OpenMP runtime with global symbols, and its own team waits there, ready at once. A runtime that is not
 * there is not loaded. Asking a GNU team for fewer threads than it has would end the others, so that callers pass
 * torch.get_num_threads(), and threads without work go home. In a forked child the team does not exist any more, and
 * waiting for it would never end: there, one thread does the work.
 */
#ifndef TRUEUP_TEAM_H
#define TRUEUP_TEAM_H

#include "base.h"
#if !defined(_WIN32)
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#endif

typedef void (*Work)(void *);

#if defined(_WIN32)
static void team_init(void) {}
static ALWAYS_INLINE int team_run(Work work, void *data, int threads)
{
    (void)work, (void)data, (void)threads;
    return 0;
}
static ALWAYS_INLINE void team_yield(void) {}
static ALWAYS_INLINE int team_number(void) { return 0; }
#else
static int team_forked;
static void team_child(void) { team_forked = 1; }
static void team_init(void) { pthread_atfork(NULL, NULL, team_child); }
static ALWAYS_INLINE void team_yield(void) { sched_yield(); }

static int (*team_place)(void);

/* Which of the team this thread is, as PyTorch numbers them. */
static int team_number(void) { return team_place == NULL ? 0 : team_place(); }

/* Run `work` on up to `threads` threads and return 1, or return 0 where there is no team to be had. */
static int team_run(Work work, void *data, int threads)
{
    static void (*parallel)(Work, void *, unsigned, unsigned);
    static int (*limit)(void), (*inside)(void);
    if (threads < 2 || team_forked)
        return 0;
    if (parallel == NULL) { /* looked for each time until it is there: torch may be imported later */
        void *symbols[] = {dlsym(RTLD_DEFAULT, "GOMP_parallel"), dlsym(RTLD_DEFAULT, "omp_get_max_threads"),
                           dlsym(RTLD_DEFAULT, "omp_in_parallel"), dlsym(RTLD_DEFAULT, "omp_get_thread_num")};
        if (symbols[0] == NULL || symbols[1] == NULL || symbols[2] == NULL || symbols[3] == NULL)
            return 0;
        memcpy(&team_place, &symbols[3], sizeof team_place);
        memcpy(&limit, &symbols[1], sizeof limit);
        memcpy(&inside, &symbols[2], sizeof inside);
        memcpy(&parallel, &symbols[0], sizeof parallel);
    }
    int most = limit();
    threads = threads < most ? threads : most;
    if (threads < 2 || inside())
        return 0;
    parallel(work, data, (unsigned)threads, 0);
    return 1;
}
#endif

#endif
