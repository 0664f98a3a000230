// Work that threads share: each takes an equal part, whose results do not depend on the number of parts.
#pragma once
#ifdef _OPENMP
#include <omp.h>
#endif

#include "elementary.h"

struct Part {
    int index, count;
    long first(long n) const { return n * index / count; }
    long end(long n) const { return n * (index + 1) / count; }
};

template <class Run>
void in_parts(int threads, Run run) {
#ifdef _OPENMP
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        run(Part{omp_get_thread_num(), omp_get_num_threads()});
        return;
    }
#endif
    run(Part{0, 1});
}

// Numbers that come next, because processors do not foresee as many streams, or not over the border of a page.
template <class T>
inline void foresee(const T* next, int count) {
    for (int line = 0; line < count * int(sizeof(T)); line += 64) __builtin_prefetch((const char*)next + line);
}
