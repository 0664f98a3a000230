// Feature maps of rows of K numbers with their L2 norm, forward and backward.
#include <vector>

#include "maps.h"
#include "parts.h"

template <int NAME>
inline float slope(float x) {
    if (NAME == SILU) {
        float s = sigmoid32(x);
        return s * (1 + x * (1 - s));
    }
    if (NAME == RELU) return x > 0 ? 1 : 0;
    if (NAME == ELU || NAME == ELU1) return x > 0 ? 1 : exp32(x);
    if (NAME == EXP) return x > 10 ? 0 : exp32(x > 10 ? 10 : x);
    return 1;
}

template <int NAME, class T>
void plain_backward(const T* x, const T* dy, T* dx, int K, bool l2, float* f) {
    float squares = 0, along = 0;
#pragma omp simd reduction(+ : squares, along)
    for (int i = 0; i < K; i++) {
        f[i] = plain<NAME>(load(x + i));
        squares += f[i] * f[i];
        along += f[i] * load(dy + i);
    }
    float rho = l2 ? 1 / std::sqrt(squares + EPS) : 1;
    float c = l2 ? rho * rho * along : 0;
#pragma omp simd
    for (int i = 0; i < K; i++) {
        store(dx + i, slope<NAME>(load(x + i)) * rho * (load(dy + i) - c * f[i]));
    }
}

// d_exponents, d_units: [K], to which this row's gradients are added.
template <int ANGLE, int KIND, class T>
void power_backward(const T* x, const T* dy, T* dx, int K, const Settings& map, const float* exponents,
                    const float* units, float* d_exponents, float* d_units, float* memory) {
    Row row = describe_row<ANGLE>(x, K, map);
    constexpr bool constant = KIND == FIRST || KIND == SECOND;
    float *MG = memory, *M2 = memory + K, *As = memory + 2 * K, *logs = memory + 3 * K;
    float sum_MG = 0, sum_M2 = 0, sum_Aa = 0, sum_MG_log = 0, sum_M2_log = 0;
#pragma omp simd reduction(+ : sum_MG, sum_M2, sum_Aa, sum_MG_log, sum_M2_log)
    for (int i = 0; i < K; i++) {
        float entry = load(x + i), d1 = load(dy + i), d2 = load(dy + K + i);
        float b = __builtin_fabsf(entry) * (KIND == CHANNELS ? units[i] : row.base);
        float p = KIND == CHANNELS ? exponents[i] : row.p;
        float log_b = constant ? 0 : log32(b < EPS ? EPS : b);
        float M = raise<KIND>(b, log_b, p);

        float G = entry > 0 ? d1 : d2, A = 0;
        if (ANGLE != SPLIT) {
            float t = tanh32(row.argument * entry), theta = QUARTER_PI * t;
            float c = cos32(theta), s = sin32(theta);
            G = c * d1 + s * d2;
            A = QUARTER_PI * (1 - t * t) * M * (c * d2 - s * d1);
        }
        MG[i] = M * G;
        M2[i] = M * M;
        As[i] = A;
        logs[i] = log_b;
        sum_MG += MG[i];
        sum_M2 += M2[i];
        sum_Aa += A * row.argument * entry;
        sum_MG_log += MG[i] * log_b;
        sum_M2_log += M2[i] * log_b;
    }
    float rho = map.l2 ? 1 / std::sqrt(sum_M2 + EPS) : 1;
    float c = map.l2 ? rho * rho * sum_MG : 0;

    // The factor of x_i in the terms through ‖x‖: of b, of the angle, and of p.
    float through_r = row.scaled ? row.p * rho * (sum_MG - c * sum_M2) : 0;
    if (ANGLE == DIRECTION) through_r += rho * sum_Aa;
    float common = row.p_slope * rho * (sum_MG_log - c * sum_M2_log) - row.r * row.r * through_r;
    float turn = row.argument * rho;
#pragma omp simd
    for (int i = 0; i < K; i++) {
        float entry = load(x + i), E = rho * (MG[i] - c * M2[i]);
        float p = KIND == CHANNELS ? exponents[i] : row.p;
        float own = M2[i] == 0 ? 0 : p * E / entry;
        store(dx + i, own + turn * As[i] + common * entry);
        if (KIND == CHANNELS) {
            d_exponents[i] += E * logs[i];
            d_units[i] += p * E / units[i];
        }
    }
}

// x [rows, K] to y [rows, features]; row i belongs to head i mod heads. p, u: [heads, K] of Pola, or null.
template <class T>
void forward(const T* x, T* y, long rows, int heads, int K, const Settings& map, const float* p, const float* u,
             int threads) {
    long features = map.name == POWER ? 2 * K : K;
    in_parts(threads, [=](Part part) {
        std::vector<float> memory(2 * K);
        for (long i = part.first(rows), end = part.end(rows); i < end; i++) {
            long channel = p ? i % heads * K : 0;
            forward_row(x + i * K, y + i * features, K, map, p + channel, u + channel, memory.data());
        }
    });
}

// dp, du: [threads, heads, K], zero, of which each part adds to its own.
template <class T>
void backward(const T* x, const T* dy, T* dx, long rows, int heads, int K, const Settings& map, const float* p,
              const float* u, float* dp, float* du, int threads) {
    long features = map.name == POWER ? 2 * K : K;
    in_parts(threads, [=](Part part) {
        std::vector<float> memory(4 * K);
        for (long i = part.first(rows), end = part.end(rows); i < end; i++) {
            const T *x_i = x + i * K, *dy_i = dy + i * features;
            T* dx_i = dx + i * K;
            long channel = p ? i % heads * K : 0, own = p ? part.index * heads * K + channel : 0;
            choose_map(
                map, p,
                [&](auto name) { plain_backward<name.value>(x_i, dy_i, dx_i, K, map.l2, memory.data()); },
                [&](auto angle, auto kind) {
                    power_backward<angle.value, kind.value>(x_i, dy_i, dx_i, K, map, p + channel, u + channel,
                                                            dp + own, du + own, memory.data());
                });
        }
    });
}

// Arrays x, y and their gradients are of bf16 or fp32.
extern "C" {
void map_forward(bool narrow, const void* x, void* y, long rows, int heads, int K, const Settings* map,
                 const float* p, const float* u, int threads) {
    auto run = [=](auto* y) { forward((decltype(y))x, y, rows, heads, K, *map, p, u, threads); };
    narrow ? run((uint16_t*)y) : run((float*)y);
}

void map_backward(bool narrow, const void* x, const void* dy, void* dx, long rows, int heads, int K,
                  const Settings* map, const float* p, const float* u, float* dp, float* du, int threads) {
    auto run = [=](auto* dx) {
        backward((decltype(dx))x, (decltype(dx))dy, dx, rows, heads, K, *map, p, u, dp, du, threads);
    };
    narrow ? run((uint16_t*)dx) : run((float*)dx);
}
}
