// exp, log, tanh, sin and cos in fp32 as plain arithmetic, which compilers turn into vector instructions.
// Each follows Cephes: a polynomial on a short range, error below 2e-7 relative. NaN stays NaN.
#pragma once
#include <cstdint>
#include <cstring>

inline float of_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

// bf16 is the upper half of fp32.
inline float load(const float* x) { return *x; }
inline float load(const uint16_t* x) { return of_bits(uint32_t(*x) << 16); }
inline void store(float* y, float x) { *y = x; }
inline void store(uint16_t* y, float x) {
    uint32_t bits = bits_of(x);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
    *y = x == x ? rounded : 0x7fc0;
}

// x as T has it.
template <class T>
inline float rounded(float x) {
    T y;
    store(&y, x);
    return load(&y);
}

inline float exp32(float x) {
    float clamped = x < -87.3f ? -87.3f : x;
    clamped = clamped > 89.0f ? 89.0f : clamped;

    // e^x = 2^n e^r with |r| ≤ ln(2)/2; ln(2) in two parts keeps r exact.
    float n = __builtin_rintf(clamped * 1.44269504f);
    float r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;

    // Two factors, because 2^128 is no fp32 number.
    int32_t whole = int32_t(n), half = whole >> 1;
    float first = of_bits(uint32_t(half + 127) << 23);
    float second = of_bits(uint32_t(whole - half + 127) << 23);
    return p * first * second;
}

inline float log32(float x) {  // of normal x > 0
    uint32_t bits = bits_of(x);
    int32_t exponent = int32_t((bits >> 23) & 0xff) - 127;
    float m = of_bits((bits & 0x7fffff) | 0x3f800000);  // 1 ≤ m < 2
    bool large = m > 1.41421356f;
    m = large ? 0.5f * m : m;
    float e = float(exponent + (large ? 1 : 0)), f = m - 1.0f, z = f * f;

    float p = 7.0376836292e-2f;
    p = p * f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    float y = p * f * z - 2.12194440e-4f * e - 0.5f * z;
    return y + f + 0.693359375f * e + (x - x);  // x − x is NaN for ∞ and NaN
}

inline float tanh32(float x) {
    float a = __builtin_fabsf(x), z = a * a;
    float e = exp32(-2.0f * a);
    float large = (1.0f - e) / (1.0f + e);  // loses digits near 0
    float p = -5.70498872745e-3f;
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    float small = p * z * a + a;
    return __builtin_copysignf(a < 0.625f ? small : large, x);
}

inline float sin32(float t) {  // of |t| ≤ π/4
    float z = t * t, p = -1.9515295891e-4f;
    p = p * z + 8.3321608736e-3f;
    p = p * z - 1.6666654611e-1f;
    return p * z * t + t;
}

inline float cos32(float t) {  // of |t| ≤ π/4
    float z = t * t, p = 2.443315711809948e-5f;
    p = p * z - 1.388731625493765e-3f;
    p = p * z + 4.166664568298827e-2f;
    return p * z * z - 0.5f * z + 1.0f;
}

inline float sigmoid32(float x) { return 1.0f / (1.0f + exp32(-x)); }

inline float expm1_32(float x) {  // of x ≤ 0
    float p = 0.00112340422f;
    p = p * x + 0.00818961363f;
    p = p * x + 0.0416300728f;
    p = p * x + 0.166662419f;
    p = p * x + 0.499999819f;
    float near = p * x * x + x;
    return x > -0.5f ? near : exp32(x) - 1.0f;
}

inline float softplus32(float x) {
    // log(1 + e^x) = max(x, 0) + log(1 + e^−|x|); the quotient corrects the rounding of 1 + e^−|x|.
    float e = exp32(-__builtin_fabsf(x)), u = 1.0f + e;
    float log1p = u == 1.0f ? e : log32(u) * (e / (u == 1.0f ? 1.0f : u - 1.0f));
    return (x > 0.0f ? x : 0.0f) + log1p;
}
