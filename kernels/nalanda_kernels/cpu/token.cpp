// A token of all layers: a list of operations on arrays of N rows, run by one team of threads.
#include "rows.h"
#include "step.h"

enum Action { NORM, PRODUCT, STEP, LAYER_NORM, SWIGLU, LOG_SIGMOID, ROTATE };

// `Operation` of token.py. Arrays are of the model's dtype T, but for x of LAYER_NORM and y of
// LOG_SIGMOID.
struct Operation {
    const void *x, *weight, *bias, *added, *step;
    void* y;
    int32_t kind, N, K, M, waits;  // waits: all threads wait behind it for each other
    float number;                  // ε of a norm
};

// x / √(mean x² + ε) ⊙ weight
template <class T>
void run_norm(const T* x, const T* weight, T* y, int K, float eps) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int i = 0; i < K; i++) squares += load(x + i) * load(x + i);
    float root = 1 / std::sqrt(squares / K + eps);
#pragma omp simd
    for (int i = 0; i < K; i++) store(y + i, load(x + i) * root * load(weight + i));
}

// SiLU(a) ⊙ b
template <class T>
inline float swiglu(const T* a, float b) {
    float x = load(a);
    return rounded<T>(x * sigmoid32(x)) * b;
}

// The norm over all heads of x in fp32, and its gate (or null).
template <class T>
void run_layer_norm(const float* x, const T* weight, const T* bias, const T* gate, T* y, int K, float eps) {
    float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < K; i++) sum += x[i];
    float mean = sum / K;
#pragma omp simd reduction(+ : squares)
    for (int i = 0; i < K; i++) squares += (x[i] - mean) * (x[i] - mean);
    float root = 1 / std::sqrt(squares / K + eps);
    for (int i = 0; i < K; i++) {
        float normed = rounded<T>((x[i] - mean) * root * load(weight + i) + load(bias + i));
        store(y + i, gate ? swiglu(gate + i, normed) : normed);
    }
}

// The pairs (x_i, x_{i + M}) of a head by the angles position · frequency_i.
template <class T>
void run_rotation(const T* x, const float* frequencies, float position, T* y, int M) {
    for (int i = 0; i < M; i++) {
        float angle = position * frequencies[i], c = std::cos(angle), s = std::sin(angle);
        float a = load(x + i), b = load(x + M + i);
        store(y + i, a * c - b * s);
        store(y + M + i, b * c + a * s);
    }
}

template <class T>
void run_operation(const Operation& op, Part part) {
    const T *x = (const T*)op.x, *weight = (const T*)op.weight, *bias = (const T*)op.bias, *added = (const T*)op.added;
    T* y = (T*)op.y;
    long K = op.K;
    switch (op.kind) {
        case NORM:
            for (long n = part.first(op.N); n < part.end(op.N); n++) {
                run_norm(x + n * K, weight, y + n * K, K, op.number);
            }
            return;
        case PRODUCT: return run_linear(Linear<T>{weight, bias, x, added, y, op.N, op.K, op.M}, part);
        case STEP: return run_step<T>(*(const Step*)op.step, part);
        case LAYER_NORM:
            for (long n = part.first(op.N); n < part.end(op.N); n++) {
                run_layer_norm((const float*)op.x + n * K, weight, bias, added ? added + n * K : added, y + n * K, K,
                               op.number);
            }
            return;
        case SWIGLU:
            for (long i = part.first(op.N * K); i < part.end(op.N * K); i++) store(y + i, swiglu(x + i, load(added + i)));
            return;
        case LOG_SIGMOID:
            for (long i = part.first(op.N * K); i < part.end(op.N * K); i++) {
                ((float*)op.y)[i] = -softplus32(-load(x + i)) / op.number;
            }
            return;
        case ROTATE:
            long heads = K / (2 * op.M);
            for (long i = part.first(op.N * heads); i < part.end(op.N * heads); i++) {
                float position = ((const int64_t*)op.bias)[i / heads];
                run_rotation(x + i * 2 * op.M, (const float*)op.weight, position, y + i * 2 * op.M, op.M);
            }
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
