// Scores and decays of chunks whose keys decay by channel, and their backward. The head of model/chunk_forward.py has
// the formulas. A chunk has C tokens and K channels; e_t is e^g of a token, and Δ_ij the product of e_t over j < t ≤ i.
#include <algorithm>
#include <vector>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "parts.h"
#include "rows.h"

constexpr int COLUMNS = 8;         // channels whose keys registers hold
constexpr int ROWS = 4;            // of scores, whose gradients they hold
constexpr float LEAST = 1.6e-30f;  // smaller decays are 0, as in torch: numbers below 1e-38 are slow

inline Lanes all(float x) { return x - Lanes{}; }

inline float flushed(float x) { return x < LEAST ? 0 : x; }

// In its scope, results below the smallest normal number are 0.
struct Flushing {
#if defined(__SSE2__)
    unsigned before = _mm_getcsr();
    Flushing() { _mm_setcsr(before | 0x8040); }
    ~Flushing() { _mm_setcsr(before); }
#endif
};

inline void exponentials(const float* g, long n, float* e) {
#pragma omp simd
    for (long i = 0; i < n; i++) e[i] = flushed(exp32(g[i]));
}

// What COLUMNS channels of a token add to its scores.
struct Columns {
    float q[COLUMNS], r[COLUMNS], k[COLUMNS], e[COLUMNS];
};

// Adds these channels' share to tril(Δ QK⊤) and tril(Δ RK⊤, −1), of the columns j in [first, first + LANES): a lane is a
// key, which decays from row to row. Rows of scores are `width` numbers apart.
template <bool TWO>
inline void add_scores(const Columns* x, int C, int first, int width, float* qk, float* rk) {
    Lanes keys[COLUMNS] = {}, lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    auto add = [&](int i, bool new_key) {
        Lanes of_q = read_as<Lanes>(qk + i * width), of_r = TWO ? read_as<Lanes>(rk + i * width) : Lanes{};
#pragma GCC unroll 8
        for (int n = 0; n < COLUMNS; n++) {
            keys[n] *= x[i].e[n];
            if (TWO) of_r = multiply_add(keys[n], all(x[i].r[n]), of_r);
            if (new_key) keys[n] = lane == all(i - first) ? all(x[i].k[n]) : keys[n];
            of_q = multiply_add(keys[n], all(x[i].q[n]), of_q);
        }
        std::memcpy(qk + i * width, &of_q, sizeof of_q);
        if (TWO) std::memcpy(rk + i * width, &of_r, sizeof of_r);
    };
    int i = first;
    for (; i < C && i < first + LANES; i++) add(i, true);
    for (; i < C; i++) add(i, false);
}

// LANES channels of a token: what is given, its gradients, and the share in dg of pairs with its key.
struct Token {
    Lanes q, r, k, e, d_q, d_r, d_k, d_g, share;
};

// Columns [first, first + LANES) of [C, K] to a field, zeros behind the last one; and back.
inline void gather(const float* x, int C, int K, int first, Token* tokens, Lanes Token::*field) {
    for (int i = 0; i < C; i++, x += K) {
        Lanes y = {};
        if (first + LANES <= K) y = read_as<Lanes>(x + first);
        else std::memcpy(&y, x + first, 4 * (K - first));
        tokens[i].*field = y;
    }
}

inline void scatter(const Token* tokens, Lanes Token::*field, int C, int K, int first, float* y) {
    for (int i = 0; i < C; i++, y += K) {
        const Lanes& x = tokens[i].*field;
        if (first + LANES <= K) std::memcpy(y + first, &x, sizeof x);
        else std::memcpy(y + first, &x, 4 * (K - first));
    }
}

// The gradients of ROWS rows of scores at a key.
struct Scores {
    float q[ROWS], r[ROWS];
};

// From ROWS rows of scores, i = first on, [C] each.
inline void add_gradients(Token* x, const Scores* scores, int first, int C) {
    int rows = C < ROWS ? C : ROWS;
    Lanes since[ROWS], q[ROWS], r[ROWS], d_q[ROWS] = {}, d_r[ROWS] = {}, sum;

    // Keys among these rows.
    for (int n = 0; n < rows; n++) {
        int i = first + n;
        Lanes decay = all(1);
        x[i].d_q += scores[i].q[n] * x[i].k;
        x[i].d_k += scores[i].q[n] * x[i].q;
        for (int j = i - 1; j >= first; j--) {
            decay *= x[j + 1].e;
            float of_q = scores[j].q[n], of_r = scores[j].r[n];
            Lanes key = decay * x[j].k, d_k = decay * (of_q * x[i].q + of_r * x[i].r);
            x[i].d_q += of_q * key;
            x[i].d_r += of_r * key;
            x[j].d_k += d_k;
            x[j].share = d_k * x[j].k;
        }
        sum = all(0);
        for (int j = first; j < i; j++) x[j + 1].d_g += sum += x[j].share;
        since[n] = decay;
        q[n] = decay * x[i].q;
        r[n] = decay * x[i].r;
    }

    // Keys before them: Δ_ij is Δ_i,first Δ_first,j.
    Lanes decay = all(1);
    for (int j = first - 1; j >= 0; j--) {
        decay *= x[j + 1].e;
        Lanes key = decay * x[j].k, d_k = {};
#pragma GCC unroll 4
        for (int n = 0; n < ROWS; n++) {
            Lanes of_q = all(scores[j].q[n]), of_r = all(scores[j].r[n]);
            d_k = multiply_add(of_q, q[n], multiply_add(of_r, r[n], d_k));
            d_q[n] = multiply_add(of_q, key, d_q[n]);
            d_r[n] = multiply_add(of_r, key, d_r[n]);
        }
        d_k *= decay;
        x[j].d_k += d_k;
        x[j].share = d_k * x[j].k;
    }
    // dg_t of t ≤ first takes the shares of all these rows, dg_t of a later one those of the rows from t on.
    sum = all(0);
    for (int j = 0; j < first; j++) x[j + 1].d_g += sum += x[j].share;
    sum = all(0);
    for (int n = rows - 1; n >= 0; n--) {
        Token& token = x[first + n];
        if (n > 0) token.d_g += sum += q[n] * d_q[n] + r[n] * d_r[n];
        token.d_q += since[n] * d_q[n];
        token.d_r += since[n] * d_r[n];
    }
}

extern "C" {
// q, r, k, g [P, C, K] to eᵞ and e^{γ_C − γ} [P, C, K], qk and rk [P, C, C]. r and rk may be null.
void channel_scores(const float* q, const float* r, const float* k, const float* g, float* decay_in,
                    float* decay_out, float* qk, float* rk, long P, int C, int K, int threads) {
    in_parts(threads, [=](Part part) {
        Flushing scope;
        int width = (C + LANES - 1) / LANES * LANES;
        std::vector<float> e(C * K), scores(2 * C * width);
        std::vector<Columns> columns(C);
        for (long p = part.first(P); p < part.end(P); p++) {
            long at = p * C * K;
            exponentials(g + at, C * K, e.data());
            for (int i = 0; i < C; i++)
                for (int c = 0; c < K; c++) {
                    float* y = decay_in + at + i * K + c;
                    *y = i ? flushed(y[-K] * e[i * K + c]) : e[c];
                }
            for (int i = C - 1; i >= 0; i--)
                for (int c = 0; c < K; c++) {
                    float* y = decay_out + at + i * K + c;
                    *y = i < C - 1 ? flushed(y[K] * e[(i + 1) * K + c]) : 1;
                }

            std::fill(scores.begin(), scores.end(), 0);
            float *of_q = scores.data(), *of_r = of_q + C * width;
            for (int c = 0; c < K; c += COLUMNS) {
                int count = K - c < COLUMNS ? K - c : COLUMNS;
                for (int i = 0; i < C; i++) {
                    long row = at + i * K + c;
                    columns[i] = {};
                    for (int n = 0; n < count; n++) {
                        columns[i].q[n] = q[row + n];
                        columns[i].r[n] = r ? r[row + n] : 0;
                        columns[i].k[n] = k[row + n];
                        columns[i].e[n] = e[i * K + c + n];
                    }
                }
                auto add = r ? add_scores<true> : add_scores<false>;
                for (int j = 0; j < C; j += LANES) add(columns.data(), C, j, width, of_q + j, of_r + j);
            }
            for (int i = 0; i < C; i++) {
                // Above the diagonal lanes had no key yet: there 0 · ∞ is no number.
                float *row = of_q + i * width, *other = of_r + i * width;
                std::fill(row + i + 1, row + C, 0);
                std::fill(other + i, other + C, 0);
                std::memcpy(qk + (p * C + i) * C, row, 4 * C);
                if (r) std::memcpy(rk + (p * C + i) * C, other, 4 * C);
            }
        }
    });
}

// From d_qk and d_rk to d_q, d_r and d_k, which are added to. reads, writes: shares of dg at the tokens that read S and
// that write to it, [P, C, K]; reads becomes dg. r, d_rk and d_r may be null, and d_r may be d_k.
void channel_gradients(const float* q, const float* r, const float* k, const float* g, const float* d_qk,
                       const float* d_rk, float* d_q, float* d_r, float* d_k, float* reads, const float* writes,
                       long P, int C, int K, int threads) {
    in_parts(threads, [=](Part part) {
        Flushing scope;
        std::vector<float> decays(C * K);
        std::vector<Token> memory(C);
        std::vector<Scores> scores((C + ROWS - 1) / ROWS * C);
        Token* x = memory.data();
        for (long p = part.first(P); p < part.end(P); p++) {
            long at = p * C * K;
            exponentials(g + at, C * K, decays.data());
            for (int i = 0; i < C; i++) {
                long row = (p * C + i) * C;
                for (int j = 0; j <= i; j++) {
                    Scores& pair = scores[i / ROWS * C + j];
                    pair.q[i % ROWS] = d_qk[row + j];
                    pair.r[i % ROWS] = r ? d_rk[row + j] : 0;
                }
            }

            for (int c = 0; c < K; c += LANES) {
                std::fill(x, x + C, Token{});
                gather(q + at, C, K, c, x, &Token::q);
                if (r) gather(r + at, C, K, c, x, &Token::r);
                gather(k + at, C, K, c, x, &Token::k);
                gather(decays.data(), C, K, c, x, &Token::e);
                gather(d_q + at, C, K, c, x, &Token::d_q);
                // R may be K: then d_r stays 0 until it is added to d_k.
                if (r && d_r != d_k) gather(d_r + at, C, K, c, x, &Token::d_r);
                gather(d_k + at, C, K, c, x, &Token::d_k);

                // dg_t takes the reads of i ≥ t, the writes of j < t, and the pairs with j < t ≤ i.
                gather(reads + at, C, K, c, x, &Token::d_g);
                gather(writes + at, C, K, c, x, &Token::share);
                for (int i = C - 2; i >= 0; i--) x[i].d_g += x[i + 1].d_g;
                Lanes sum = {};
                for (int i = 1; i < C; i++) x[i].d_g += sum += x[i - 1].share;

                for (int i = 0; i < C; i += ROWS) add_gradients(x, scores.data() + i / ROWS * C, i, C);
                if (d_r == d_k)
                    for (int i = 0; i < C; i++) x[i].d_k += x[i].d_r;
                scatter(x, &Token::d_q, C, K, c, d_q + at);
                if (r && d_r != d_k) scatter(x, &Token::d_r, C, K, c, d_r + at);
                scatter(x, &Token::d_k, C, K, c, d_k + at);
                scatter(x, &Token::d_g, C, K, c, reads + at);
            }
        }
    });
}
}
