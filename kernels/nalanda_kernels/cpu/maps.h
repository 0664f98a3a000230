// Feature maps of a row of K numbers with their L2 norm. The head of triton/feature_maps.py derives the formulas; names
// here are its names.
#pragma once
#include <cmath>
#include <type_traits>

#include "elementary.h"
#include "structures.h"

enum Name { IDENTITY, SILU, RELU, ELU, ELU1, EXP, POWER };
enum Angle { SPLIT, RAW, DIRECTION };

constexpr float EPS = 1e-6f, QUARTER_PI = 0.78539816f;

template <int NAME>
inline float plain(float x) {
    if (NAME == SILU) return x * sigmoid32(x);
    if (NAME == RELU) return x < 0 ? 0 : x;
    if (NAME == ELU) return x > 0 ? x : expm1_32(x < 0 ? x : x - x);
    if (NAME == ELU1) return x > 0 ? 1 + x : exp32(x);
    if (NAME == EXP) return exp32(x > 10 ? 10 : x);
    return x;
}

template <int NAME, class T>
void plain_forward(const T* x, T* y, int K, bool l2, float* f) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int i = 0; i < K; i++) {
        f[i] = plain<NAME>(load(x + i));
        squares += f[i] * f[i];
    }
    float rho = l2 ? 1 / std::sqrt(squares + EPS) : 1;
#pragma omp simd
    for (int i = 0; i < K; i++) store(y + i, f[i] * rho);
}

// What the entries of a row share.
struct Row {
    float r = 1;          // 1/‖x‖
    float p = 1;          // exponent, where channels have none of their own
    float base = 1;       // |b| = base · |x|
    float argument = 1;   // a = argument · x
    float p_slope = 0;    // dp/dx_i = p_slope · x_i
    bool scaled = false;  // whether b contains r
};

template <int ANGLE, class T>
Row describe_row(const T* x, int K, const Settings& map) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int i = 0; i < K; i++) squares += load(x + i) * load(x + i);

    Row row;
    row.r = 1 / std::sqrt(squares + EPS);
    row.p = map.exponent;
    row.scaled = map.query && map.scale > 0;
    if (row.scaled) row.base = map.scale * row.r;
    if (ANGLE == DIRECTION) row.argument = map.alpha * row.r;
    if (map.exponent == 0) {
        float t = tanh32(map.n_scale / row.r);
        row.p = map.power * (0.5f + t);
        row.p_slope = row.r * map.power * map.n_scale * (1 - t * t);
    }
    return row;
}

// b^p, exactly 0 where b ≤ 1e-6. KIND of the exponent: 1 or 2 itself, or any number, of a row or of each channel.
enum Kind { ANY = 0, FIRST = 1, SECOND = 2, CHANNELS = 3 };

template <int KIND>
inline float raise(float b, float log_b, float p) {
    float M = KIND == FIRST ? b : KIND == SECOND ? b * b : exp32(p * log_b);
    return b <= EPS ? 0 : M;
}

// exponents, units: [K] of Pola, whose b = unit · x; null elsewhere.
template <int ANGLE, int KIND, class T>
void power_forward(const T* x, T* y, int K, const Settings& map, const float* exponents, const float* units,
                   float* memory) {
    Row row = describe_row<ANGLE>(x, K, map);
    constexpr bool constant = KIND == FIRST || KIND == SECOND;
    float *first = memory, *second = memory + K, squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int i = 0; i < K; i++) {
        float entry = load(x + i);
        float b = __builtin_fabsf(entry) * (KIND == CHANNELS ? units[i] : row.base);
        float p = KIND == CHANNELS ? exponents[i] : row.p;
        float log_b = constant ? 0 : log32(b < EPS ? EPS : b);
        float M = raise<KIND>(b, log_b, p);
        squares += M * M;
        if (ANGLE == SPLIT) {
            first[i] = entry > 0 ? M : 0;
            second[i] = entry > 0 ? 0 : M;
        } else {
            float theta = QUARTER_PI * tanh32(row.argument * entry);
            first[i] = M * cos32(theta);
            second[i] = M * sin32(theta);
        }
    }
    float rho = map.l2 ? 1 / std::sqrt(squares + EPS) : 1;
#pragma omp simd
    for (int i = 0; i < 2 * K; i++) store(y + i, memory[i] * rho);
}

template <int N>
using Constant = std::integral_constant<int, N>;

// plain(name) for a map of single entries, power(angle, kind) for the others.
template <class Plain, class Power>
void choose_map(const Settings& map, bool by_channel, const Plain& plain, const Power& power) {
    auto with_kind = [&](auto kind) {
        switch (map.angle) {
            case SPLIT: return power(Constant<SPLIT>(), kind);
            case RAW: return power(Constant<RAW>(), kind);
            case DIRECTION: return power(Constant<DIRECTION>(), kind);
        }
    };
    switch (map.name) {
        case IDENTITY: return plain(Constant<IDENTITY>());
        case SILU: return plain(Constant<SILU>());
        case RELU: return plain(Constant<RELU>());
        case ELU: return plain(Constant<ELU>());
        case ELU1: return plain(Constant<ELU1>());
        case EXP: return plain(Constant<EXP>());
    }
    if (by_channel) return power(Constant<SPLIT>(), Constant<CHANNELS>());
    if (map.exponent == 1) return with_kind(Constant<FIRST>());
    if (map.exponent == 2) return with_kind(Constant<SECOND>());
    with_kind(Constant<ANY>());
}

template <class T>
void forward_row(const T* x, T* y, int K, const Settings& map, const float* p, const float* u, float* memory) {
    choose_map(
        map, p, [=, &map](auto name) { plain_forward<name.value>(x, y, K, map.l2, memory); },
        [=, &map](auto angle, auto kind) { power_forward<angle.value, kind.value>(x, y, K, map, p, u, memory); });
}
