// Chooses the experts of each token by the formulas of layers/routing.py, without groups of experts.
#include "kernels.h"
#include "parallel.h"

namespace {

constexpr long kTokensPerPiece = 16;  // for fewer, waking other threads costs more than it saves

float sigmoid(float x) { return 1.f / (1.f + std::exp(-x)); }

// Replaces x by its softmax.
void softmax(float* x, long count) {
  const float top = *std::max_element(x, x + count);
  float sum = 0;
  for (long i = 0; i < count; i++) sum += x[i] = std::exp(x[i] - top);
  for (long i = 0; i < count; i++) x[i] /= sum;
}

// Writes the indices of the top_k largest of x in descending order, lower indices first among equals. Overwrites x.
void largest(float* x, long count, long top_k, int64_t* ids) {
  for (long k = 0; k < top_k; k++) {
    long best = 0;
    for (long i = 1; i < count; i++) best = x[i] > x[best] ? i : best;
    ids[k] = best, x[best] = kNegInf;
  }
}

void weigh(const Routing& r, float* weights) {
  if (r.weights == Routing::kNormalized) {
    float sum = 0;
    for (long k = 0; k < r.top_k; k++) sum += weights[k];
    for (long k = 0; k < r.top_k; k++) weights[k] /= sum + r.epsilon;
  } else if (r.weights == Routing::kSoftmaxOfChosen) {
    softmax(weights, r.top_k);
  } else if (r.weights == Routing::kSigmoidOfChosen) {
    for (long k = 0; k < r.top_k; k++) weights[k] = sigmoid(weights[k]);
  }
  for (long k = 0; k < r.top_k; k++) weights[k] *= r.scale;
}

thread_local Scratch scratch;

void route_token(const Routing& r, const float* logits, float* weights, int64_t* ids) {
  const long count = r.num_experts;
  float *scores = (float*)scratch.get(2 * count * sizeof(float)), *choice = scores + count;
  for (long i = 0; i < count; i++) scores[i] = r.bias ? logits[i] + r.bias[i] : logits[i];
  if (r.scores == Routing::kSoftmax) softmax(scores, count);
  if (r.scores == Routing::kSigmoid) std::transform(scores, scores + count, scores, sigmoid);
  for (long i = 0; i < count; i++) choice[i] = r.correction ? scores[i] + r.correction[i] : scores[i];
  largest(choice, count, r.top_k, ids);
  for (long k = 0; k < r.top_k; k++) weights[k] = scores[ids[k]];
  weigh(r, weights);
}

}  // namespace

extern "C" {

// weights and ids [tokens, top_k]: the experts of each token, best first, for logits [tokens, num_experts].
void quire_route(const Routing* r, const float* logits, float* weights, int64_t* ids, long tokens) {
  parallel_for(tokens, kTokensPerPiece, [&](long t) {
    route_token(*r, logits + t * r->num_experts, weights + t * r->top_k, ids + t * r->top_k);
  });
}
}
