#pragma once

#include <cstdint>

namespace nibble {

/// What a router's logits become before experts are chosen and weighed.
enum class RouterScores : uint8_t {
  kSoftmax,          // over all experts
  kSoftmaxOfChosen,  // the logits choose; softmax over the chosen ones weighs (gpt-oss)
  kSigmoid,          // DeepSeek
};

/// How a token chooses its experts by their scores, in F32. A correction, where there is one, is
/// added to the scores that choose, not to those that weigh.
struct RouterForm {
  RouterScores scores = RouterScores::kSoftmax;
  bool renormalise = false;  // the weights of the chosen ones are divided by their sum + epsilon
  float epsilon = 0.0F;
  float factor = 1.0F;  // multiplies the weights
  // Experts are chosen from the `kept_groups` of `groups` equal groups whose two largest scores
  // have the largest sums.
  int32_t groups = 1;
  int32_t kept_groups = 1;
};

}  // namespace nibble
