// Multiplies a row by a weight with quire's kernels: KIND N K REPEATS. Random weights.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "compact.h"
#include "quant.h"

extern "C" {
void quire_set_threads(int n);
void quire_gemm_pack(const bf16* weight, long ldw, bf16* packed, long n, long k, int silu_mul);
long quire_gemm_compact(const bf16* weight, long ldw, uint16_t* data, uint64_t* exceptions, uint32_t* first,
                        float* scales, uint8_t* units, long n, long k, int silu_mul, long most);
void quire_gemm_run(const bf16* x, long ldx, const bf16* packed, const float* bias, void* out, long ldo, long m, long n,
                    long k, int flags, int path);
void quire_gemm_run_compact(const bf16* x, long ldx, const Compact* weight, const float* bias, void* out, long ldo,
                            long m, long n, long k, int flags, int path);
void quire_gemm_run_quant(const bf16* x, long ldx, const Quant* weight, const float* bias, void* out, long ldo, long m,
                          long n, long k, int flags, int path);
}

template <typename F>
static int repeat(const char* count, F&& product) {
  for (int i = atoi(count); i > 0; i--) product();
  return 0;
}

int main(int count, char** arguments) {
  if (count != 5) return 2;
  const std::string kind = arguments[1];
  const long n = atol(arguments[2]), k = atol(arguments[3]), steps = (k + 63) / 64, blocks = (n + 31) / 32;
  quire_set_threads(1);
  std::vector<bf16> x(k), out(blocks * 32), weight;
  for (long i = 0; i < k; i++) x[i] = to_bf16(float(i % 23 - 11) / 7);
  if (kind == "bf16" || kind == "bf16 in 12 bits") {
    for (long i = 0; i < n * k; i++) weight.push_back(to_bf16(float(rand() % 2001 - 1000) / 40000));
    if (kind == "bf16") {
      std::vector<bf16> packed(blocks * 32 * steps * 64);
      quire_gemm_pack(weight.data(), k, packed.data(), n, k, 0);
      return repeat(arguments[4],
                    [&] { quire_gemm_run(x.data(), k, packed.data(), nullptr, out.data(), n, 1, n, k, 0, 0); });
    }
    const long k_steps = (k + 31) / 32, most = n * k / 16;
    std::vector<uint16_t> data(blocks * k_steps * Compact::kStepWords + 4096);
    std::vector<uint64_t> exceptions(most + 1);
    std::vector<uint32_t> first(blocks);
    std::vector<float> scales(blocks);
    std::vector<uint8_t> units(blocks * (k_steps + 7) / 8 * 32 + blocks * 32);
    if (quire_gemm_compact(weight.data(), k, data.data(), exceptions.data(), first.data(), scales.data(), units.data(),
                           n, k, 0, most) < 0)
      return 3;
    const Compact compact{data.data(), exceptions.data(), first.data(), scales.data(), int(k_steps), units.data()};
    return repeat(arguments[4],
                  [&] { quire_gemm_run_compact(x.data(), k, &compact, nullptr, out.data(), n, 1, n, k, 0, 0); });
  }
  // as worker/cpu stores the blocks of GGUF files; the values of codes and scales do not change what is executed
  const bool super = kind == "q4_K";
  const int number = super ? kQ4_K : kIntegers4;
  std::vector<uint8_t> codes(blocks * steps * quant_bits(number) * 256 + 65536), scales(blocks * steps * 1024);
  for (uint8_t& code : codes) code = uint8_t(rand());
  const Quant quant{codes.data(), scales.data(), nullptr, number, super ? 256 : 32, int(super ? steps / 4 : steps * 2),
                    int(steps), 1, 1};
  return repeat(arguments[4],
                [&] { quire_gemm_run_quant(x.data(), k, &quant, nullptr, out.data(), n, 1, n, k, 0, 0); });
}
