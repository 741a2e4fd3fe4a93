#include "engine/sampler_inputs.h"

#include "engine/bad_words.h"

namespace nibble {

SamplerInput SamplerInputs::next(const Sequence& sequence, int64_t ahead) {
  const Request& request = sequence.request;
  const int64_t step = sequence.generated() + ahead;
  banned_.clear();
  if (step < request.min_tokens) {
    for (const int32_t token : request.stop_tokens) {
      banned_.push_back(token);
    }
    for (const int64_t token : config_.eos_token_ids) {
      banned_.push_back(static_cast<int32_t>(token));
    }
    std::erase_if(banned_, [&](int32_t t) { return t < 0 || t >= config_.vocab_size; });
  }
  add_bad_words(sequence, banned_);
  return {.params = request.sampling,
          .seed = sequence.seed,
          .step = step,
          .seen = sequence.seen,
          .banned = banned_,
          .mask = sequence.mask,
          .top_logprobs = request.top_logprobs};
}

}  // namespace nibble
