// Multiplies a row by a weight with ggml's CPU backend: KIND N K REPEATS. The weight is in the layout that llama.cpp
// chooses for this machine (`repack`). A graph has sixteen products, as one of a model has many.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

int main(int count, char** arguments) {
  if (count != 5) return 2;
  const std::string kind = arguments[1];
  const ggml_type type = kind == "q4_0" ? GGML_TYPE_Q4_0 : kind == "q4_K" ? GGML_TYPE_Q4_K : GGML_TYPE_BF16;
  const int64_t n = atol(arguments[2]), k = atol(arguments[3]);
  ggml_backend_t cpu = ggml_backend_cpu_init();
  ggml_backend_cpu_set_n_threads(cpu, 1);
  ggml_context* weights = ggml_init({1 << 20, nullptr, true});
  ggml_tensor* weight = ggml_new_tensor_2d(weights, type, k, n);
  const ggml_backend_dev_t device = ggml_backend_get_device(cpu);
  const auto extra = (ggml_backend_dev_get_extra_bufts_t)ggml_backend_reg_get_proc_address(
      ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts");
  ggml_backend_buffer_type_t place = ggml_backend_cpu_buffer_type();
  if (type != GGML_TYPE_BF16) place = extra(device)[0];
  if (ggml_backend_alloc_ctx_tensors_from_buft(weights, place) == nullptr) return 3;
  std::vector<uint8_t> bytes(ggml_nbytes(weight));
  ggml_backend_tensor_set(weight, bytes.data(), 0, bytes.size());
  ggml_context* products = ggml_init({4 << 20, nullptr, true});
  ggml_tensor* x = ggml_new_tensor_2d(products, GGML_TYPE_F32, k, 1);
  ggml_cgraph* graph = ggml_new_graph(products);
  for (int i = 0; i < 16; i++) ggml_build_forward_expand(graph, ggml_mul_mat(products, weight, x));
  ggml_backend_alloc_ctx_tensors(products, cpu);
  std::vector<float> row(k);
  for (int64_t i = 0; i < k; i++) row[i] = float(i % 23 - 11) / 7;
  ggml_backend_tensor_set(x, row.data(), 0, k * sizeof(float));
  fprintf(stderr, "%s\n", ggml_backend_buft_name(place));
  for (int i = atoi(arguments[4]); i > 0; i -= 16)
    if (ggml_backend_graph_compute(cpu, graph) != GGML_STATUS_SUCCESS) return 4;
  return 0;
}
