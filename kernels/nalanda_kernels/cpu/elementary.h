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

// A polynomial of x, from the coefficient of the highest power on.
template <class... Rest>
inline float polynomial(float x, float sum, Rest... coefficients) {
    ((sum = sum * x + coefficients), ...);
    return sum;
}

inline float exp32(float x) {
    float clamped = x < -86.9f ? -86.9f : x;
    clamped = clamped > 89.0f ? 89.0f : clamped;

    // e^x = 2^n e^r with |r| ≤ ln(2)/2; ln(2) in two parts keeps r exact.
    float n = __builtin_rintf(clamped * 1.44269504f);
    float r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    float p = polynomial(r, 1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
                         1.6666665459e-1f, 5.0000001201e-1f);
    p = p * (r * r) + r + 1.0f;
    return (p + p) * of_bits(uint32_t(int32_t(n) + 126) << 23);  // 2^128 is no fp32 number, 2^127 is
}

inline float log32(float x) {  // of normal x > 0
    // x = 2^e (1 + f) with √½ ≤ 1 + f < √2
    uint32_t bits = bits_of(x);
    int32_t e = int32_t(bits - 0x3f3504f3) >> 23;
    float n = float(e), f = of_bits(bits - (uint32_t(e) << 23)) - 1.0f, z = f * f;
    float p = polynomial(f, 7.0376836292e-2f, -1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f,
                         1.4249322787e-1f, -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f);
    float y = p * f * z - 2.12194440e-4f * n - 0.5f * z;
    return y + f + 0.693359375f * n + (x - x);  // x − x is NaN for ∞ and NaN
}

inline float tanh32(float x) {  // error below 1e-7, not relative
    float t = 1.0f - 2.0f / (1.0f + exp32(2.0f * __builtin_fabsf(x)));
    return __builtin_copysignf(t, x);
}

inline float sin32(float t) {  // of |t| ≤ π/4
    float z = t * t, p = polynomial(z, -1.9515295891e-4f, 8.3321608736e-3f, -1.6666654611e-1f);
    return p * z * t + t;
}

inline float cos32(float t) {  // of |t| ≤ π/4
    float z = t * t, p = polynomial(z, 2.443315711809948e-5f, -1.388731625493765e-3f, 4.166664568298827e-2f);
    return p * z * z - 0.5f * z + 1.0f;
}

inline float sigmoid32(float x) { return 1.0f / (1.0f + exp32(-x)); }

inline float expm1_32(float x) {  // of x ≤ 0
    float p = polynomial(x, 0.00112340422f, 0.00818961363f, 0.0416300728f, 0.166662419f, 0.499999819f);
    return x > -0.5f ? p * x * x + x : exp32(x) - 1.0f;
}

inline float softplus32(float x) {
    // log(1 + e^x) = max(x, 0) + log(1 + e^−|x|); the quotient corrects the rounding of 1 + e^−|x|.
    float e = exp32(-__builtin_fabsf(x)), u = 1.0f + e;
    float log1p = u == 1.0f ? e : log32(u) * (e / (u == 1.0f ? 1.0f : u - 1.0f));
    return (x > 0.0f ? x : 0.0f) + log1p;
}
