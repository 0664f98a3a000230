// Work between matrix products, in one pass each way: SwiGLU, RMSNorm with what surrounds it, and short convolutions.
// The heads of triton/epilogues.py and triton/short_conv.py derive the formulas; names here are their names.
#include <algorithm>
#include <cmath>
#include <vector>

#include "parts.h"
#include "structures.h"

constexpr int BLOCK = 64;  // columns that registers hold

// Entries [column, column + n) of a row in fp32; zeros where there is no array.
template <class N>
inline void read(const Array& array, long row, long column, N n, float* y) {
    long at = row * array.stride + column;
    if (!array.data)
        for (int i = 0; i < n; i++) y[i] = 0;
    else if (array.narrow)
        for (int i = 0; i < n; i++) y[i] = load((const uint16_t*)array.data + at + i);
    else
        for (int i = 0; i < n; i++) y[i] = ((const float*)array.data)[at + i];
}

template <class N>
inline void write(const Array& array, long row, long column, N n, const float* y) {
    long at = row * array.stride + column;
    if (!array.data) return;
    if (array.narrow)
        for (int i = 0; i < n; i++) store((uint16_t*)array.data + at + i, y[i]);
    else
        for (int i = 0; i < n; i++) ((float*)array.data)[at + i] = y[i];
}

// As torch's operators round each result of theirs.
template <class N>
inline void round(bool narrow, N n, float* y) {
    if (narrow)
        for (int i = 0; i < n; i++) y[i] = rounded<uint16_t>(y[i]);
}

// SiLU(y) in place, rounded.
template <class N>
inline void activate(bool narrow, N n, float* y) {
    for (int i = 0; i < n; i++) y[i] *= sigmoid32(y[i]);
    round(narrow, n, y);
}

inline float silu_slope(float x, float s) { return s * (1 + x * (1 - s)); }  // s: its sigmoid

// run(column, n) for each block of columns in [first, end). n is a constant but for the last one, for the compiler.
template <class Run>
void in_blocks(long first, long end, Run run) {
    for (long column = first; column < end; column += BLOCK) {
        if (end - column < BLOCK) run(column, int(end - column));
        else run(column, std::integral_constant<int, BLOCK>());
    }
}

// run(row, column, n) for the blocks of all rows.
template <class Run>
void in_rows(long rows, long N, int threads, Run run) {
    in_parts(threads, [=](Part part) {
        for (long row = part.first(rows); row < part.end(rows); row++)
            in_blocks(0, N, [=](long column, auto n) { run(row, column, n); });
    });
}

// 1/√(mean s² + ε)
inline float inverse_root(const float* s, long V, float eps) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int i = 0; i < V; i++) squares += s[i] * s[i];
    return 1 / std::sqrt(squares / V + eps);
}

// run(W), of which 4 is a constant, for the compiler.
template <class Run>
void with_taps(long W, Run run) {
    if (W == 4) run(std::integral_constant<int, 4>());
    else run(int(W));
}

// One sequence's rows of a convolution, from the W − 1 before its first on.
struct Rows {
    const Array &x, &state;
    long first, past;  // rows of x, and of the state

    template <class N>
    void at(long t, long column, N n, float* y) const {
        t < 0 ? read(state, past + t, column, n, y) : read(x, first + t, column, n, y);
    }

    // z_t = Σ_i w_i ⊙ x_{t−W+1+i}
    template <class N, class Taps>
    void convolve(long t, long column, N n, const float* w, long D, Taps W, float* z) const {
        float entries[BLOCK];
        for (int c = 0; c < n; c++) z[c] = 0;
        for (int i = 0; i < W; i++) {
            at(t - W + 1 + i, column, n, entries);
            for (int c = 0; c < n; c++) z[c] += w[i * D + column + c] * entries[c];
        }
        round(x.narrow, n, z);
    }
};

extern "C" {
void swiglu(const Array* a, const Array* b, const Array* y, long rows, long N, int threads) {
    in_rows(rows, N, threads, [=](long row, long column, auto n) {
        float p[BLOCK], q[BLOCK];
        read(*a, row, column, n, p);
        read(*b, row, column, n, q);
        activate(a->narrow, n, p);
        for (int i = 0; i < n; i++) q[i] *= p[i];
        write(*y, row, column, n, q);
    });
}

void swiglu_backward(const Array* a, const Array* b, const Array* dy, const Array* da, const Array* db, long rows,
                     long N, int threads) {
    in_rows(rows, N, threads, [=](long row, long column, auto n) {
        float p[BLOCK], q[BLOCK], d[BLOCK];
        read(*a, row, column, n, p);
        read(*b, row, column, n, q);
        read(*dy, row, column, n, d);
        for (int i = 0; i < n; i++) {
            float s = sigmoid32(p[i]), through_a = d[i] * q[i] * silu_slope(p[i], s);
            q[i] = d[i] * p[i] * s;
            p[i] = through_a;
        }
        write(*da, row, column, n, p);
        write(*db, row, column, n, q);
    });
}

// weight: [V]; a row of the gate has H of these.
void rms_norm(const Array* x, const Array* add, const Array* gate, const Array* total, const Array* y,
              const float* weight, long rows, long H, long V, float eps, int threads) {
    in_parts(threads, [=](Part part) {
        std::vector<float> memory(2 * V);
        float *s = memory.data(), *g = s + V;
        for (long row = part.first(rows), end = part.end(rows); row < end; row++) {
            read(*x, row, 0, V, s);
            if (add->data) {
                read(*add, row, 0, V, g);
                for (int i = 0; i < V; i++) s[i] += g[i];
                // Rounded as it is stored, so that the backward reads the same.
                write(*total, row, 0, V, s);
                read(*total, row, 0, V, s);
            }
            float r = inverse_root(s, V, eps);
            for (int i = 0; i < V; i++) s[i] *= r * weight[i];

            if (gate->data) {
                read(*gate, row / H, row % H * V, V, g);
                activate(gate->narrow, V, g);
                round(y->narrow, V, s);
                for (int i = 0; i < V; i++) s[i] *= g[i];
            }
            write(*y, row, 0, V, s);
        }
    });
}

// d_weight: [⌈rows / SPAN⌉, V], of which each row sums over SPAN rows.
void rms_norm_backward(const Array* total, const Array* gate, const Array* d_total, const Array* dy, const Array* dx,
                       const Array* d_add, const Array* d_gate, const float* weight, float* d_weight, long rows,
                       long H, long V, float eps, int threads) {
    in_parts(threads, [=](Part part) {
        std::vector<float> memory(3 * V);
        float *n = memory.data(), *d = n + V, *g = d + V;
        long spans = (rows + SPAN - 1) / SPAN;
        for (long row = part.first(spans) * SPAN, end = std::min(part.end(spans) * SPAN, rows); row < end; row++) {
            float* dw = d_weight + row / SPAN * V;
            if (row % SPAN == 0) std::fill(dw, dw + V, 0.0f);

            read(*total, row, 0, V, n);
            read(*dy, row, 0, V, d);
            float r = inverse_root(n, V, eps), along = 0;
            for (int i = 0; i < V; i++) n[i] *= r;

            if (gate->data) {
                read(*gate, row / H, row % H * V, V, g);
                for (int i = 0; i < V; i++) {
                    float s = sigmoid32(g[i]), through_gate = d[i] * n[i] * weight[i] * silu_slope(g[i], s);
                    d[i] *= g[i] * s;
                    g[i] = through_gate;
                }
                write(*d_gate, row / H, row % H * V, V, g);
            }

            // d is e now. Through w and the norm: r (w ⊙ e − n mean(w ⊙ e ⊙ n)).
#pragma omp simd reduction(+ : along)
            for (int i = 0; i < V; i++) {
                dw[i] += d[i] * n[i];
                d[i] *= weight[i];
                along += d[i] * n[i];
            }
            along /= V;
            read(*d_total, row, 0, V, g);  // of the residual stream
            for (int i = 0; i < V; i++) d[i] = r * (d[i] - n[i] * along) + g[i];
            write(*dx, row, 0, V, d);
            write(*d_add, row, 0, V, d);
        }
    });
}

// x, y: [bounds[N], D]; weight: [W, D]; state: [N·(W − 1), D], the inputs before each sequence.
void short_conv(const Array* x, const Array* state, const Array* y, const float* weight, const int64_t* bounds, long N,
                long D, long W, long silu, int threads) {
    in_parts(threads, [=](Part part) {
        long row = part.first(bounds[N]), end = part.end(bounds[N]);
        for (long n = 0; n < N; n++) {
            Rows rows{*x, *state, bounds[n], (n + 1) * (W - 1)};
            for (; row < std::min<long>(end, bounds[n + 1]); row++) {
                in_blocks(0, D, [=](long column, auto width) {
                    float z[BLOCK];
                    with_taps(W, [&](auto W) { rows.convolve(row - rows.first, column, width, weight, D, W, z); });
                    if (silu) activate(x->narrow, width, z);
                    write(*y, row, column, width, z);
                });
            }
        }
    });
}

// A thread has columns of its own, so its sums of d_weight [W, D], zero before, are no other's.
void short_conv_backward(const Array* x, const Array* state, const Array* dy, const Array* dx, const Array* d_state,
                         const float* weight, float* d_weight, const int64_t* bounds, long N, long D, long W, long silu,
                         int threads) {
    in_parts(threads, [=](Part part) {
        long blocks = (D + BLOCK - 1) / BLOCK, first = part.first(blocks) * BLOCK;
        long end = std::min(part.end(blocks) * BLOCK, D), columns = std::max(0L, end - first);
        // dz of the last W tokens, that of t at t mod W; dx_t = Σ_j w_{W−1−j} ⊙ dz_{t+j}.
        std::vector<float> memory(W * columns);
        for (long n = 0; n < N; n++) {
            Rows rows{*x, *state, bounds[n], (n + 1) * (W - 1)};
            std::fill(memory.begin(), memory.end(), 0);
            for (long t = bounds[n + 1] - rows.first - 1; t >= (state->data ? 1 - W : 0); t--) {
                auto step = [&](long column, auto width, auto W) {
                    float *dz = memory.data() + column - first, *dz_t = dz + (t + W) % W * columns;
                    float entries[BLOCK], z[BLOCK], dx_t[BLOCK] = {};
                    read(t < 0 ? Array() : *dy, rows.first + t, column, width, dz_t);
                    if (silu && t >= 0) {
                        rows.convolve(t, column, width, weight, D, W, z);
                        for (int c = 0; c < width; c++) dz_t[c] *= silu_slope(z[c], sigmoid32(z[c]));
                    }

                    rows.at(t, column, width, entries);
                    for (int j = 0; j < W; j++) {
                        const float *later = dz + (t + W + j) % W * columns, *w = weight + (W - 1 - j) * D + column;
                        float* dw = d_weight + (W - 1 - j) * D + column;
                        for (int c = 0; c < width; c++) {
                            dx_t[c] += w[c] * later[c];
                            dw[c] += later[c] * entries[c];
                        }
                    }
                    if (t >= 0) write(*dx, rows.first + t, column, width, dx_t);
                    else write(*d_state, rows.past + t, column, width, dx_t);
                };
                in_blocks(first, end, [&](long column, auto width) {
                    with_taps(W, [&](auto W) { step(column, width, W); });
                });
            }
        }
    });
}
}
