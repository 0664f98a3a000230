// Feature maps of rows of K numbers with their L2 norm, forward and backward.
#include <algorithm>
#include <vector>

#include "maps.h"

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

template <int ANGLE, class T>
void backward_kind(const T* x, const T* dy, T* dx, int K, const Settings& map, float* memory) {
    auto run = power_backward<ANGLE, ANY, T>;
    if (map.exponent == 1) run = power_backward<ANGLE, FIRST, T>;
    if (map.exponent == 2) run = power_backward<ANGLE, SECOND, T>;
    run(x, dy, dx, K, map, nullptr, nullptr, nullptr, nullptr, memory);
}

template <class T>
void backward_row(const T* x, const T* dy, T* dx, int K, const Settings& map, const float* p, const float* u,
                  float* dp, float* du, float* memory) {
    switch (map.name) {
        case IDENTITY: return plain_backward<IDENTITY>(x, dy, dx, K, map.l2, memory);
        case SILU: return plain_backward<SILU>(x, dy, dx, K, map.l2, memory);
        case RELU: return plain_backward<RELU>(x, dy, dx, K, map.l2, memory);
        case ELU: return plain_backward<ELU>(x, dy, dx, K, map.l2, memory);
        case ELU1: return plain_backward<ELU1>(x, dy, dx, K, map.l2, memory);
        case EXP: return plain_backward<EXP>(x, dy, dx, K, map.l2, memory);
    }
    if (p) return power_backward<SPLIT, CHANNELS>(x, dy, dx, K, map, p, u, dp, du, memory);
    switch (map.angle) {
        case SPLIT: return backward_kind<SPLIT>(x, dy, dx, K, map, memory);
        case RAW: return backward_kind<RAW>(x, dy, dx, K, map, memory);
        case DIRECTION: return backward_kind<DIRECTION>(x, dy, dx, K, map, memory);
    }
}

// x [rows, K] to y [rows, features]; row i belongs to head i mod heads. p, u: [heads, K] of Pola, or null.
template <class T>
void forward(const T* x, T* y, long rows, int heads, int K, const Settings* map, const float* p, const float* u,
             int threads) {
    long features = map->name == POWER ? 2 * K : K;
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> memory(2 * K);
#pragma omp for schedule(static)
        for (long i = 0; i < rows; i++) {
            long channel = i % heads * K;
            const float *p_i = p ? p + channel : p, *u_i = p ? u + channel : u;
            forward_row(x + i * K, y + i * features, K, *map, p_i, u_i, memory.data());
        }
    }
}

// dp, du: [parts, heads, K], zero. The part of a row is fixed, so their sum does not depend on timing.
template <class T>
void backward(const T* x, const T* dy, T* dx, long rows, int heads, int K, const Settings* map, const float* p,
              const float* u, float* dp, float* du, int parts) {
    long features = map->name == POWER ? 2 * K : K, size = (rows + parts - 1) / parts;
#pragma omp parallel for num_threads(parts) schedule(static)
    for (long part = 0; part < parts; part++) {
        std::vector<float> memory(4 * K);
        long end = std::min(rows, (part + 1) * size);
        for (long i = part * size; i < end; i++) {
            long channel = i % heads * K, own = part * heads * K + channel;
            backward_row(x + i * K, dy + i * features, dx + i * K, K, *map, p ? p + channel : p,
                         p ? u + channel : u, p ? dp + own : dp, p ? du + own : du, memory.data());
        }
    }
}

extern "C" {
void map_forward_fp32(const float* x, float* y, long rows, int heads, int K, const Settings* map, const float* p,
                      const float* u, int threads) {
    forward(x, y, rows, heads, K, map, p, u, threads);
}

void map_forward_bf16(const uint16_t* x, uint16_t* y, long rows, int heads, int K, const Settings* map,
                      const float* p, const float* u, int threads) {
    forward(x, y, rows, heads, K, map, p, u, threads);
}

void map_backward_fp32(const float* x, const float* dy, float* dx, long rows, int heads, int K,
                       const Settings* map, const float* p, const float* u, float* dp, float* du, int parts) {
    backward(x, dy, dx, rows, heads, K, map, p, u, dp, du, parts);
}

void map_backward_bf16(const uint16_t* x, const uint16_t* dy, uint16_t* dx, long rows, int heads, int K,
                       const Settings* map, const float* p, const float* u, float* dp, float* du, int parts) {
    backward(x, dy, dx, rows, heads, K, map, p, u, dp, du, parts);
}
}
