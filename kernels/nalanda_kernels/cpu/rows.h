// Few rows times a matrix, y = x Wᵀ: each weight is read once, so memory is the limit.
#pragma once
#include <cmath>
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

constexpr int GROUP = 256;  // numbers of x with one scale, beside weights in int8

// Rows of x beside weights in int8: int16 times a scale for each group. The last group ends in zeros.
struct Codes {
    const int16_t* codes;
    const float* scales;
};

inline int groups_of(int K) { return (K + GROUP - 1) / GROUP; }

// Rows of x from row n on.
inline const float* from_row(const float* x, long n, int K) { return x + n * K; }
inline Codes from_row(Codes x, long n, int K) {
    return {x.codes + n * groups_of(K) * GROUP, x.scales + n * groups_of(K)};
}

struct CodeMemory {
    std::vector<int16_t> codes;
    std::vector<float> scales;
};

// x [N, K] in int16: a rounding is at most 2^-16 of the group's largest number.
template <class X>
Codes encode(const X* x, int N, int K, CodeMemory& memory) {
    int groups = groups_of(K);
    memory.codes.assign(long(N) * groups * GROUP, 0);
    memory.scales.resize(long(N) * groups);
    for (long i = 0; i < long(N) * groups; i++) {
        int first = i % groups * GROUP, count = K - first < GROUP ? K - first : GROUP;
        const X* row = x + i / groups * K + first;
        int16_t* y = memory.codes.data() + i * GROUP;
        float largest = 0, unsound = 0;
#pragma omp simd reduction(max : largest) reduction(+ : unsound)
        for (int k = 0; k < count; k++) {
            float size = std::fabs(load(row + k));
            largest = size > largest ? size : largest;
            unsound += size * 0;
        }
        // NaN and ∞ have no code: the scale is NaN then.
        memory.scales[i] = largest / 32767 + unsound;
        float inverse = largest > 1e-30f && unsound == 0 ? 32767 / largest : 0;
#pragma omp simd
        for (int k = 0; k < count; k++) {
            float code = load(row + k) * inverse;
            y[k] = int16_t(int(code + (code < 0 ? -0.5f : 0.5f)));
        }
    }
    return {memory.codes.data(), memory.scales.data()};
}

// Products with int8 go in strides of as many numbers as an operation multiplies. `dot` adds them to int32, exactly.
#if defined(__AVX512BW__)
constexpr int STRIDE = 32;
typedef __m512i Ints;
inline Ints widen(const int8_t* w) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)w)); }
inline Ints load_codes(const int16_t* x) {
    Ints codes = _mm512_loadu_si512(x);
    asm("" : "+v"(codes));  // in a register: compilers would read it again for each row of W
    return codes;
}
inline Ints dot(Ints sum, Ints w, Ints x) {
#if defined(__AVX512VNNI__)
    return _mm512_dpwssd_epi32(sum, w, x);
#else
    return _mm512_add_epi32(sum, _mm512_madd_epi16(w, x));
#endif
}
inline Lanes as_floats(Ints sum) { return (Lanes)_mm512_cvtepi32_ps(sum); }
#elif defined(__AVX2__) && !defined(__AVX512F__)
constexpr int STRIDE = 16;
typedef __m256i Ints;
inline Ints widen(const int8_t* w) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)w)); }
inline Ints load_codes(const int16_t* x) { return read_as<Ints>(x); }
inline Ints dot(Ints sum, Ints w, Ints x) { return _mm256_add_epi32(sum, _mm256_madd_epi16(w, x)); }
inline Lanes as_floats(Ints sum) { return (Lanes)_mm256_cvtepi32_ps(sum); }
#else
constexpr int STRIDE = LANES;
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
template <class X>
Ints widen(const X* x) {
    Ints wide;
    for (int i = 0; i < LANES; i++) wide[i] = x[i];
    return wide;
}
inline Ints load_codes(const int16_t* x) { return widen(x); }
inline Ints dot(Ints sum, Ints w, Ints x) { return sum + w * x; }
inline Lanes as_floats(Ints sum) { return __builtin_convertvector(sum, Lanes); }
#endif

// products[n][r] += x_n · w_r over STRIDE numbers, of rows that are `width` and `room` numbers apart.
template <int N, int R>
__attribute__((always_inline)) inline void add_products(const int8_t* w, long width, const int16_t* x, long room,
                                                        Ints (&products)[N][R]) {
    Ints codes[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) codes[n] = load_codes(x + n * room);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        Ints wide = widen(w + r * width);
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) products[n][r] = dot(products[n][r], wide, codes[n]);
    }
}

// As below, for weights in int8.
template <int N, int R>
void multiply(const int8_t* W, Codes x, int K, float (*sums)[4]) {
    int groups = groups_of(K);
    long room = long(groups) * GROUP;
    Lanes totals[N][R] = {};
    for (int g = 0; g < groups; g++) {
        int k = g * GROUP, end = K - k < GROUP ? K : k + GROUP;
        // Sums of integers are exact in any order, and two of each hide the time of an operation.
        constexpr bool TWO = N * R < 8;
        Ints products[N][R] = {}, others[N][R] = {};
        for (; k + 2 * STRIDE <= end; k += 2 * STRIDE) {
            for (int r = 0; r < R && R > 1; r++) foresee(W + long(r + R) * K + k, 2 * STRIDE);
            add_products(W + k, K, x.codes + k, room, products);
            add_products(W + k + STRIDE, K, x.codes + k + STRIDE, room, TWO ? others : products);
        }
        for (; k < end; k += STRIDE) {
            int8_t rest[R][STRIDE] = {};
            int count = end - k < STRIDE ? end - k : STRIDE;
            for (int r = 0; r < R; r++) std::memcpy(rest[r], W + long(r) * K + k, count);
            add_products(rest[0], STRIDE, x.codes + k, room, products);
        }
        for (int n = 0; n < N; n++) {
            Lanes scale = Lanes{} + x.scales[long(n) * groups + g];
            for (int r = 0; r < R; r++) {
                Ints sum = (Ints)((Words)products[n][r] + (Words)others[n][r]);
                totals[n][r] = multiply_add(as_floats(sum), scale, totals[n][r]);
            }
        }
    }
    for (int n = 0; n < N; n++) {
        for (int r = 0; r < R; r++) sums[n][r] = sum_lanes(totals[n][r]);
    }
}

// sums[n][r] = x_n · W_r for N rows of x and R rows of W, all of K numbers. The order of a sum depends on K alone.
template <int N, int R, class T>
void multiply(const T* W, const float* x, int K, float (*sums)[4]) {
    Lanes totals[N][R] = {};
    int k = 0;
    for (; k + 2 * LANES <= K; k += 2 * LANES) {
        for (int r = 0; r < R; r++) {
            if (R > 1) foresee(W + long(r + R) * K + k, 2 * LANES);
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

template <int R, class T, class X>
void multiply_few(const T* W, X x, int N, int K, float (*sums)[4]) {
    switch (N) {
        case 1: return multiply<1, R>(W, x, K, sums);
        case 2: return multiply<2, R>(W, x, K, sums);
        case 3: return multiply<3, R>(W, x, K, sums);
        default: return multiply<4, R>(W, x, K, sums);
    }
}

// take(n, m, x_n · W_m) for N rows of x and the rows first ≤ m < end of W.
template <class T, class X, class Take>
void multiply_all(const T* W, X x, int N, int K, long first, long end, Take take) {
    // For few rows memory is the limit, and fastest as a single stream. For more, four rows of W share the loads of x.
    int height = N < 3 ? 1 : 4;
    for (long m = first; m < end;) {
        int rows = end - m < height ? 1 : height;
        for (int n = 0; n < N; n += 4) {
            float sums[4][4];
            int count = N - n < 4 ? N - n : 4;
            auto run = rows == 1 ? multiply_few<1, T, X> : multiply_few<4, T, X>;
            run(W + m * K, from_row(x, n, K), count, K, sums);
            for (int i = 0; i < count; i++) {
                for (int r = 0; r < rows; r++) take(n + i, m + r, sums[i][r]);
            }
        }
        m += rows;
    }
}
