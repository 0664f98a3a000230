// A token of all layers: a list of operations on arrays of N rows, run by one team of threads.
#include "step.h"

enum Action { PRODUCT, STEP, NORM, WIDE_NORM, SWIGLU };

// y [N, M] = x [N, K] times the transpose of W [M, K], plus a bias [M] and what y is added to, which may be null.
template <class T>
void run_product(const Operation& op, Part part) {
    static thread_local std::vector<float> memory;
    const T *bias = (const T*)op.bias, *added = (const T*)op.added;
    long M = op.M;
    const float* x = arrange<T>((const T*)op.x, op.N, op.K, memory);
    multiply_all((const T*)op.weight, x, op.N, op.K, part.first(M), part.end(M), [&](int n, long m, float sum) {
        float y = sum + (bias ? load(bias + m) : 0);
        if (added) y = load(added + n * M + m) + rounded<T>(y);
        store((T*)op.y + n * M + m, y);
    });
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
void run_token(const Operation* operations, int count, int threads) {
    in_parts(threads, [=](Part part) {
        for (int i = 0; i < count; i++) {
            run_operation<T>(operations[i], part);
            if (operations[i].waits) {
#pragma omp barrier
            }
        }
    });
}

extern "C" {
void token_fp32(const Operation* operations, int count, int threads) {
    run_token<float>(operations, count, threads);
}

void token_bf16(const Operation* operations, int count, int threads) {
    run_token<uint16_t>(operations, count, threads);
}
}
