// exp, log, tanh, sin and cos in fp32 as plain arithmetic, which compilers turn into vector instructions.
// A polynomial on a short range, mostly of Cephes; error below 3e-7 relative. NaN stays NaN.
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
    float clamped = x < -86.9f ? -86.9f : x;
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
    p = p * (r * r) + r + 1.0f;
    return (p + p) * of_bits(uint32_t(int32_t(n) + 126) << 23);  // 2^128 is no fp32 number, 2^127 is
}

inline float log32(float x) {  // of normal x > 0
    // x = 2^e (1 + f) with √½ ≤ 1 + f < √2
    uint32_t bits = bits_of(x);
    int32_t e = int32_t(bits - 0x3f3504f3) >> 23;
    float n = float(e), f = of_bits(bits - (uint32_t(e) << 23)) - 1.0f, z = f * f;

    float p = 7.0376836292e-2f;
    p = p * f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    float y = p * f * z - 2.12194440e-4f * n - 0.5f * z;
    return y + f + 0.693359375f * n + (x - x);  // x − x is NaN for ∞ and NaN
}

inline float tanh32(float x) {  // an odd polynomial by an even one; Eigen has them, too
    float a = x < -7.9053111f ? -7.9053111f : x;
    a = a > 7.9053111f ? 7.9053111f : a;
    float z = a * a, p = -2.76076847742355e-16f;
    p = p * z + 2.00018790482477e-13f;
    p = p * z - 8.60467152213735e-11f;
    p = p * z + 5.12229709037114e-08f;
    p = p * z + 1.48572235717979e-05f;
    p = p * z + 6.37261928875436e-04f;
    p = p * z + 4.89352455891786e-03f;
    float q = 1.19825839466702e-06f;
    q = q * z + 1.18534705686654e-04f;
    q = q * z + 2.26843463243900e-03f;
    q = q * z + 4.89352518554385e-03f;
    return a * p / q;
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
