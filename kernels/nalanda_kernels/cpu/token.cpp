// A token of all layers: a list of operations on arrays of N rows, run by one team of threads.
#include "step.h"

enum Action { PRODUCT, STEP, NORM, WIDE_NORM, SWIGLU };

constexpr int ROWS = 64;

// y [N, M] = x [N, K] times the transpose of W [M, K], plus a bias [M] and what y is added to, which may be null. W
// with scales of its rows [M] is in int8.
template <class T>
void run_product(const Operation& op, Part part) {
    static thread_local std::vector<float> memory;
    static thread_local CodeMemory codes;
    const T *scale = (const T*)op.scale, *bias = (const T*)op.bias, *added = (const T*)op.added;
    const T* x = (const T*)op.x;
    long M = op.M;
    long before = 0;  // rows of x in earlier blocks
    auto take = [&](int n, long m, float sum) {
        long at = (before + n) * M + m;
        float y = sum * (scale ? load(scale + m) : 1) + (bias ? load(bias + m) : 0);
        if (added) y = load(added + at) + rounded<T>(y);
        store((T*)op.y + at, y);
    };
    long first = part.first(M), end = part.end(M);
    if (!scale) {
        multiply_all((const T*)op.weight, arrange<T>(x, op.N, op.K, memory), op.N, op.K, first, end, take);
        return;
    }
    // So many rows of x stay in a processor's nearest memory while all of W passes.
    for (; before < op.N; before += ROWS) {
        int N = op.N - before < ROWS ? op.N - before : ROWS;
        Codes block = encode(x + before * op.K, N, op.K, codes);
        multiply_all((const int8_t*)op.weight, block, N, op.K, first, end, take);
    }
}

// SiLU(a) ⊙ b
template <class T>
inline float swiglu(const T* a, float b) {
    float x = load(a);
    return rounded<T>(x * sigmoid32(x)) * b;
}

// x / √(mean x² + ε) ⊙ weight, whose gate precedes it; or with a bias a LayerNorm, whose gate follows. All but x may
// be null.
template <class T, class X>
void run_norm(const Operation& op, long n) {
    static thread_local std::vector<float> row;
    int K = op.K;
    row.resize(K);
    const X* x = (const X*)op.x + n * K;
    const T *weight = (const T*)op.weight, *bias = (const T*)op.bias;
    const T* gate = op.added ? (const T*)op.added + n * K : nullptr;
    T* y = (T*)op.y + n * K;

    float *z = row.data(), sum = 0, squares = 0;
#pragma omp simd
    for (int i = 0; i < K; i++) z[i] = load(x + i);
    for (int i = 0; i < K && gate && !bias; i++) z[i] *= load(gate + i) * sigmoid32(load(gate + i));
    if (bias) {
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < K; i++) sum += z[i];
    }
    float mean = sum / K;
#pragma omp simd reduction(+ : squares)
    for (int i = 0; i < K; i++) {
        z[i] -= mean;
        squares += z[i] * z[i];
    }
    float root = 1 / (op.M ? std::sqrt(squares / K) + op.number : std::sqrt(squares / K + op.number));
#pragma omp simd
    for (int i = 0; i < K; i++) {
        float normed = z[i] * root * (weight ? load(weight + i) : 1) + (bias ? load(bias + i) : 0);
        store(y + i, gate && bias ? swiglu(gate + i, rounded<T>(normed)) : normed);
    }
}

template <class T>
void run_swiglu(const Operation& op, Part part) {
    const T *a = (const T*)op.x, *b = (const T*)op.added;
    long entries = long(op.N) * op.K;
    for (long i = part.first(entries); i < part.end(entries); i++) store((T*)op.y + i, swiglu(a + i, load(b + i)));
}

template <class T>
void run_operation(const Operation& op, Part part) {
    switch (op.kind) {
        case PRODUCT: return run_product<T>(op, part);
        case STEP: return run_step<T>(*(const Step*)op.step, part);
        case NORM:
        case WIDE_NORM:
            for (long n = part.first(op.N); n < part.end(op.N); n++) {
                op.kind == NORM ? run_norm<T, T>(op, n) : run_norm<T, float>(op, n);
            }
            return;
        case SWIGLU: return run_swiglu<T>(op, part);
    }
}

template <class T>
void run_all(const Operation* operations, int count, int threads) {
    in_parts(threads, [=](Part part) {
        for (int i = 0; i < count; i++) {
            run_operation<T>(operations[i], part);
            if (operations[i].waits) {
#pragma omp barrier
            }
        }
    });
}

extern "C" void run_token(bool narrow, const Operation* operations, int count, int threads) {
    narrow ? run_all<uint16_t>(operations, count, threads) : run_all<float>(operations, count, threads);
}
