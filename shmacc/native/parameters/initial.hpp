// The initial contents of a table's row: a function of the table's seed and the row's id alone.
//
// So they are the same on every machine, whichever process makes the row. Random numbers come from Philox4x32-10
// (Salmon and others, "Parallel random numbers: as easy as 1, 2, 3", SC 2011), with the seed as key and the id in the
// counter. The formulas are in the docstrings of shmacc/init.py. IEEE 754 determines the results to the last bit: there
// is no fused operation (CMakeLists.txt), and only exact functions of the C library are used.
#pragma once

#include <algorithm>
#include <cmath>

#include "base/layout.hpp"

namespace shmacc {

// Computes Philox4x32-10 for kLanes counters at once. A counter is {block, 0, the id's lower half, its upper half}.
class RandomWords {
  public:
    static constexpr uint32_t kLanes = 4, kWords = 4 * kLanes;

    RandomWords(uint64_t seed, int64_t id) : seed_(seed), id_(static_cast<uint64_t>(id)) {}

    // Writes the kWords words from number first_block * 4 on.
    void get(uint32_t first_block, uint32_t (&words)[kWords]) const {
        uint32_t c[4][kLanes];
        for (uint32_t i = 0; i < kLanes; ++i) {
            c[0][i] = first_block + i;
            c[1][i] = 0;
            c[2][i] = static_cast<uint32_t>(id_);
            c[3][i] = static_cast<uint32_t>(id_ >> 32);
        }
        auto key = static_cast<uint32_t>(seed_), other = static_cast<uint32_t>(seed_ >> 32);
        for (int round = 0; round < 10; ++round, key += 0x9E3779B9u, other += 0xBB67AE85u) {
            for (uint32_t i = 0; i < kLanes; ++i) {
                const uint64_t one = uint64_t{0xD2511F53u} * c[0][i], two = uint64_t{0xCD9E8D57u} * c[2][i];
                c[0][i] = static_cast<uint32_t>(two >> 32) ^ c[1][i] ^ key;
                c[2][i] = static_cast<uint32_t>(one >> 32) ^ c[3][i] ^ other;
                c[1][i] = static_cast<uint32_t>(two);
                c[3][i] = static_cast<uint32_t>(one);
            }
        }
        for (uint32_t i = 0; i < kLanes; ++i)
            for (uint32_t k = 0; k < 4; ++k) words[4 * i + k] = c[k][i];
    }

  private:
    const uint64_t seed_, id_;
};

// The logarithm of a number between 2**-40 and 1, by its series: the last bits are the same on every machine.
inline double logarithm(double number) {
    int exponent;
    double mantissa = std::frexp(number, &exponent);  // exact
    if (mantissa < 0.75) {
        mantissa *= 2;
        --exponent;
    }
    const double s = (mantissa - 1) / (mantissa + 1), square = s * s;
    double sum = 1.0 / 21;
    for (int k = 19; k >= 1; k -= 2) sum = sum * square + 1.0 / k;
    return exponent * 0.6931471805599453 + 2 * s * sum;
}

template <size_t kCount>
double polynomial(const double (&coefficients)[kCount], double x) {
    double sum = coefficients[0];
    for (size_t i = 1; i < kCount; ++i) sum = sum * x + coefficients[i];
    return sum;
}

// The standard normal distribution's quantile (Wichura, algorithm AS 241, PPND16) of a probability from 2**-33 to
// 1 - 2**-33.
inline double normal_quantile(double probability) {
    static constexpr double kNear[] = {2.50908092873012267e+3, 3.34305755835881281e+4, 6.72657709270087009e+4,
                                       4.59219539315498715e+4, 1.37316937655094611e+4, 1.97159095030655144e+3,
                                       1.33141667891784377e+2, 3.38713287279636661e+0};
    static constexpr double kNearDivisor[] = {5.22649527885285456e+3, 2.87290857357219427e+4,
                                              3.93078958000927106e+4, 2.12137943015865959e+4,
                                              5.39419602142475111e+3, 6.87187007492057908e+2,
                                              4.23133307016009113e+1, 1.0};
    static constexpr double kFar[] = {7.74545014278341408e-4, 2.27238449892691846e-2, 2.41780725177450612e-1,
                                      1.27045825245236838e+0, 3.64784832476320461e+0, 5.76949722146069141e+0,
                                      4.63033784615654530e+0, 1.42343711074968358e+0};
    static constexpr double kFarDivisor[] = {1.05075007164441684e-9, 5.47593808499534495e-4,
                                             1.51986665636164572e-2, 1.48103976427480075e-1,
                                             6.89767334985100005e-1, 1.67638483018380385e+0,
                                             2.05319162663775882e+0, 1.0};
    const double q = probability - 0.5;
    if (std::abs(q) <= 0.425) {
        const double r = 0.180625 - q * q;
        return polynomial(kNear, r) * q / polynomial(kNearDivisor, r);
    }
    const double r = std::sqrt(-logarithm(q < 0 ? probability : 1 - probability)) - 1.6;
    const double far = polynomial(kFar, r) / polynomial(kFarDivisor, r);
    return q < 0 ? -far : far;
}

// Writes the initial row of an id: `width` numbers.
template <class T>
void initial_row(const TableSpec& table, int64_t id, T* row, uint64_t width) {
    const double first = table.numbers[0], second = table.numbers[1];
    if (table.initial == kConstant) {
        std::fill_n(row, width, static_cast<T>(first));
        return;
    }
    const RandomWords random(table.seed, id);
    uint32_t words[RandomWords::kWords];
    for (uint64_t at = 0; at < width; at += RandomWords::kWords) {
        random.get(static_cast<uint32_t>(at / 4), words);
        const uint64_t count = std::min<uint64_t>(RandomWords::kWords, width - at);
        if (table.initial == kUniform) {
            const double range = second - first;
            for (uint64_t j = 0; j < count; ++j)
                row[at + j] = static_cast<T>(first + range * (words[j] * 0x1p-32));
        } else {
            for (uint64_t j = 0; j < count; ++j)
                row[at + j] = static_cast<T>(first + second * normal_quantile((words[j] + 0.5) * 0x1p-32));
        }
    }
}

}  // namespace shmacc
