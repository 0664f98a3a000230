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

// From the features y: with G for the gradient along a pair's angle, MG = M G and M2 = M², both of y, so with the norm
// in them. d_exponents, d_units: [K], to which this row's gradients are added.
template <int ANGLE, int KIND, class T>
void power_backward(const T* x, const T* y, const T* dy, T* dx, int K, const Settings& map, const float* exponents,
                    const float* units, float* d_exponents, float* d_units, float* memory) {
    Row row = describe_row<ANGLE>(x, K, map);
    float *MG = memory, *M2 = memory + K, *As = memory + 2 * K, *logs = memory + 3 * K;
    float sum_MG = 0, sum_M2 = 0, sum_Aa = 0, sum_MG_log = 0, sum_M2_log = 0;
#pragma omp simd reduction(+ : sum_MG, sum_M2, sum_Aa, sum_MG_log, sum_M2_log)
    for (int i = 0; i < K; i++) {
        float entry = load(x + i), y1 = load(y + i), y2 = load(y + K + i), d1 = load(dy + i), d2 = load(dy + K + i);
        float b = __builtin_fabsf(entry) * (KIND == CHANNELS ? units[i] : row.base);
        float t = ANGLE == SPLIT ? 1 : tanh32(row.argument * entry);
        MG[i] = y1 * d1 + y2 * d2;
        M2[i] = y1 * y1 + y2 * y2;
        As[i] = row.argument * QUARTER_PI * (1 - t * t) * (y1 * d2 - y2 * d1);
        sum_MG += MG[i];
        sum_M2 += M2[i];
        sum_Aa += As[i] * entry;
        if (KIND == ANY || KIND == CHANNELS) {
            logs[i] = log32(b < EPS ? EPS : b);
            sum_MG_log += MG[i] * logs[i];
            sum_M2_log += M2[i] * logs[i];
        }
    }
    float c = map.l2 ? sum_MG : 0;

    // The factor of x_i in the terms through ‖x‖: of b, of the angle, and of p.
    float through_r = row.scaled ? row.p * (sum_MG - c * sum_M2) : 0;
    if (ANGLE == DIRECTION) through_r += sum_Aa;
    float common = row.p_slope * (sum_MG_log - c * sum_M2_log) - row.r * row.r * through_r;
#pragma omp simd
    for (int i = 0; i < K; i++) {
        float entry = load(x + i), E = MG[i] - c * M2[i];
        float p = KIND == CHANNELS ? exponents[i] : row.p;
        float own = M2[i] == 0 ? 0 : p * E / entry;
        store(dx + i, own + As[i] + common * entry);
        if (KIND == CHANNELS) {
            d_exponents[i] += E * logs[i];
            d_units[i] += p * E / units[i];
        }
    }
}

// Rows of x [rows, K], bf16 or fp32, and of y and dy [rows, features]. Row i belongs to head i mod heads. p, u:
// [heads, K] of Pola, or null.
extern "C" {
void map_forward(bool narrow, const void* x, void* y, long rows, int heads, int K, const Settings* map,
                 const float* p, const float* u, int threads) {
    long features = map->name == POWER ? 2 * K : K;
    auto run = [=](auto* x, auto* y) {
        in_parts(threads, [=](Part part) {
            std::vector<float> memory(2 * K);
            for (long i = part.first(rows), end = part.end(rows); i < end; i++) {
                long channel = p ? i % heads * K : 0;
                forward_row(x + i * K, y + i * features, K, *map, p + channel, u + channel, memory.data());
            }
        });
    };
    narrow ? run((const uint16_t*)x, (uint16_t*)y) : run((const float*)x, (float*)y);
}

// dp, du: [threads, heads, K], zero, of which each part adds to its own.
void map_backward(bool narrow, const void* x, const void* y, const void* dy, void* dx, long rows, int heads, int K,
                  const Settings* map, const float* p, const float* u, float* dp, float* du, int threads) {
    long features = map->name == POWER ? 2 * K : K;
    auto run = [=](auto* x, auto* y, auto* dy, auto* dx) {
        in_parts(threads, [=](Part part) {
            std::vector<float> memory(4 * K);
            for (long i = part.first(rows), end = part.end(rows); i < end; i++) {
                auto *x_i = x + i * K, *y_i = y + i * features, *dy_i = dy + i * features;
                auto* dx_i = dx + i * K;
                foresee(x_i + 2 * K, K);
                foresee(y_i + 2 * features, features);
                foresee(dy_i + 2 * features, features);
                long channel = p ? i % heads * K : 0, own = p ? part.index * heads * K + channel : 0;
                choose_map(
                    *map, p,
                    [&](auto name) { plain_backward<name.value>(x_i, dy_i, dx_i, K, map->l2, memory.data()); },
                    [&](auto angle, auto kind) {
                        power_backward<angle.value, kind.value>(x_i, y_i, dy_i, dx_i, K, *map, p + channel,
                                                                u + channel, dp + own, du + own, memory.data());
                    });
            }
        });
    };
    using Narrow = const uint16_t*;
    using Wide = const float*;
    narrow ? run(Narrow(x), Narrow(y), Narrow(dy), (uint16_t*)dx) : run(Wide(x), Wide(y), Wide(dy), (float*)dx);
}
}
