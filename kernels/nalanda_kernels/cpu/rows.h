// Few rows times a matrix, y = x Wᵀ: each weight is read once, so memory is the limit.
#pragma once
#include <vector>
#if defined(__FMA__)
#include <immintrin.h>
#endif

#include "parts.h"

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

// Compilers keep these in registers, which they do not do with arrays of sums.
typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef float Quad __attribute__((vector_size(16)));

// a ⊙ b + c. Said outright, because compilers for some processors leave a few sums of a loop without fma: rows would
// then depend on the rows beside them.
inline Lanes multiply_add(Lanes a, Lanes b, Lanes c) {
#if defined(__AVX512F__)
    return (Lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

template <class To, class From>
inline To read_as(const From* x) {
    To y;
    std::memcpy(&y, x, sizeof y);
    return y;
}

// 2 · LANES weights: the first half and the second, or in bf16 those at even places and those at odd ones.
struct Weights {
    Lanes first, second;
    explicit Weights(const float* w) : first(read_as<Lanes>(w)), second(read_as<Lanes>(w + LANES)) {}
    explicit Weights(const uint16_t* w) {
        Words pairs = read_as<Words>(w), even = pairs << 16, odd = pairs & 0xffff0000u;
        first = read_as<Lanes>(&even);
        second = read_as<Lanes>(&odd);
    }
};

// x [N, K] in fp32, in the order in which `Weights` of T meet it.
template <class T, class X>
const float* arrange(const X* x, int N, int K, std::vector<float>& memory) {
    if constexpr (sizeof(T) == 4) return x;
    memory.resize(long(N) * K);
    for (long n = 0; n < N; n++) {
        const X* row = x + n * K;
        float* y = memory.data() + n * K;
        int k = 0;
        for (; k + 2 * LANES <= K; k += 2 * LANES) {
            for (int i = 0; i < LANES; i++) {
                y[k + i] = load(row + k + 2 * i);
                y[k + LANES + i] = load(row + k + 2 * i + 1);
            }
        }
        for (; k < K; k++) y[k] = load(row + k);
    }
    return memory.data();
}

inline float sum_lanes(Lanes x) {
    Quad sum = {};
    for (int i = 0; i < LANES; i += 4) sum += read_as<Quad>((const float*)&x + i);
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// sums[n][r] = x_n · W_r for N rows of x and R rows of W, all of K numbers. The order of a sum depends on K alone.
template <int N, int R, class T>
void multiply(const T* W, const float* x, int K, float (*sums)[4]) {
    Lanes totals[N][R] = {};
    int k = 0;
    for (; k + 2 * LANES <= K; k += 2 * LANES) {
        for (int r = 0; r < R; r++) {
            // The rows that come next, because processors do not foresee as many streams.
            const char* next = (const char*)(W + long(r + R) * K + k);
            int bytes = R > 1 ? 2 * LANES * sizeof(T) : 0;
            for (int line = 0; line < bytes; line += 64) __builtin_prefetch(next + line);
            Weights w(W + long(r) * K + k);
            for (int n = 0; n < N; n++) {
                const float* x_n = x + long(n) * K + k;
                totals[n][r] = multiply_add(w.first, read_as<Lanes>(x_n), totals[n][r]);
                totals[n][r] = multiply_add(w.second, read_as<Lanes>(x_n + LANES), totals[n][r]);
            }
        }
    }
    for (int n = 0; n < N; n++) {
        for (int r = 0; r < R; r++) sums[n][r] = sum_lanes(totals[n][r]);
    }
    // By fma, because compilers would round products here and there.
    for (; k < K; k++) {
        for (int n = 0; n < N; n++) {
            float entry = x[long(n) * K + k];
            for (int r = 0; r < R; r++) sums[n][r] = __builtin_fmaf(entry, load(W + long(r) * K + k), sums[n][r]);
        }
    }
}

template <int R, class T>
void multiply_few(const T* W, const float* x, int N, int K, float (*sums)[4]) {
    switch (N) {
        case 1: return multiply<1, R>(W, x, K, sums);
        case 2: return multiply<2, R>(W, x, K, sums);
        case 3: return multiply<3, R>(W, x, K, sums);
        default: return multiply<4, R>(W, x, K, sums);
    }
}

// take(n, m, x_n · W_m) for N rows of x and the rows first ≤ m < end of W.
template <class T, class Take>
void multiply_all(const T* W, const float* x, int N, int K, long first, long end, Take take) {
    // For few rows memory is the limit, and fastest as a single stream. For more, four rows of W share the loads of x.
    int height = N < 3 ? 1 : 4;
    for (long m = first; m < end;) {
        int rows = end - m < height ? 1 : height;
        for (int n = 0; n < N; n += 4) {
            float sums[4][4];
            int count = N - n < 4 ? N - n : 4;
            auto run = rows == 1 ? multiply_few<1, T> : multiply_few<4, T>;
            run(W + m * K, x + long(n) * K, count, K, sums);
            for (int i = 0; i < count; i++) {
                for (int r = 0; r < rows; r++) take(n + i, m + r, sums[i][r]);
            }
        }
        m += rows;
    }
}
