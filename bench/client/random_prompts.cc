#include <algorithm>
#include <cmath>
#include <random>
#include <unordered_set>

#include "bench/client/prompts.h"

namespace nibble {
namespace {

constexpr int kMostTries = 10;

using Random = std::mt19937_64;

int64_t uniform(Random& random, const LengthRange& range) {
  return std::uniform_int_distribution<int64_t>(range.low, range.high)(random);
}

/// Ids that may stand in a prompt: not special, and of some text.
std::vector<int32_t> usable_ids(const PromptOptions& options) {
  std::vector<int32_t> ids;
  const Tokenizer* tokenizer = options.tokenizer;
  const int64_t size = tokenizer == nullptr ? options.vocab_size : tokenizer->vocab_size();
  for (int32_t id = 0; id < size; ++id) {
    if (tokenizer == nullptr ||
        (!tokenizer->is_special(id) && !tokenizer->token_bytes(id).empty())) {
      ids.push_back(id);
    }
  }
  return ids;
}

/// Where random prompts begin in the vocabulary, and in what steps they go through it: no two
/// alike.
class Starts final {
 public:
  explicit Starts(size_t size) : size_(size) {}

  struct Start {
    size_t at = 0;
    size_t stride = 1;
  };
  Start next(Random& random, size_t i) {
    if (used_.size() == size_) {
      used_.clear();
      ++stride_;
    }
    size_t at =
        (static_cast<size_t>(uniform(random, {0, static_cast<int64_t>(size_) - 1})) + i) % size_;
    while (!used_.insert(at).second) {
      at = (at + 1) % size_;
    }
    return {.at = at, .stride = stride_};
  }

 private:
  size_t size_;
  size_t stride_ = 1;
  std::unordered_set<size_t> used_;
};

struct FittedText {
  std::string text;
  int64_t tokens = 0;
};

/// Text whose encoding has as many tokens as `ids`, as nearly as can be.
Result<FittedText> fit_text(std::vector<int32_t> ids,
                            const std::vector<int32_t>& usable,
                            const Tokenizer& tokenizer) {
  const size_t wanted = ids.size();
  FittedText best;
  for (int i = 0; i < kMostTries; ++i) {
    std::string text = tokenizer.decode(ids, DecodeSpecials::kKeep);
    NIBBLE_ASSIGN_OR_RETURN(std::vector<int32_t> again,
                            tokenizer.encode(text, SpecialTokens::kPlain));
    best = {.text = std::move(text), .tokens = std::ssize(again)};
    if (again.size() == wanted) {
      break;
    }
    while (again.size() < wanted) {
      again.push_back(usable[(again.size() * 7919 + static_cast<size_t>(i)) % usable.size()]);
    }
    again.resize(wanted);
    ids = std::move(again);
  }
  return best;
}

Status fill(Prompt& prompt,
            std::vector<int32_t> ids,
            const std::vector<int32_t>& usable,
            const PromptOptions& options) {
  prompt.input_len = std::ssize(ids);
  if (options.tokenizer == nullptr || options.as_ids) {
    prompt.ids = std::move(ids);
    return {};
  }
  NIBBLE_ASSIGN_OR_RETURN(FittedText fitted, fit_text(std::move(ids), usable, *options.tokenizer));
  prompt.text = std::move(fitted.text);
  // A server puts the tokens of its prompt prefix (BOS) in front of a text.
  prompt.input_len = fitted.tokens + std::ssize(options.tokenizer->prompt_prefix());
  return {};
}

struct Lengths {
  LengthRange input;
  LengthRange output;
};

Result<Lengths> lengths_of(const PromptOptions& options) {
  int64_t input = options.input_len;
  if (options.tokenizer != nullptr && !options.as_ids) {
    input = std::max<int64_t>(1, input - std::ssize(options.tokenizer->prompt_prefix()));
  }
  Lengths out;
  NIBBLE_ASSIGN_OR_RETURN(out.input, length_range(input, options.range_ratio, options.semantics));
  NIBBLE_ASSIGN_OR_RETURN(out.output,
                          length_range(options.output_len, options.range_ratio, options.semantics));
  return out;
}

Status no_vocabulary() {
  return make_error(StatusCode::kInvalidArgument,
                    "random prompts need --tokenizer DIR, or --vocab-size N to send token ids");
}

}  // namespace

Result<LengthRange> length_range(int64_t length, double ratio, RangeSemantics semantics) {
  const bool sglang = semantics == RangeSemantics::kSglang;
  if (!(ratio >= 0) || ratio > 1 || (!sglang && ratio == 1)) {
    return make_error(StatusCode::kInvalidArgument,
                      "--random-range-ratio {}: must be in {} with --random-range-semantics {}",
                      ratio, sglang ? "[0, 1]" : "[0, 1)", sglang ? "sglang" : "vllm");
  }
  const auto exact = static_cast<double>(length);
  LengthRange out{.low = static_cast<int64_t>(exact * ratio), .high = length};
  if (!sglang) {
    out = {.low = static_cast<int64_t>(std::floor(exact * (1 - ratio))),
           .high = static_cast<int64_t>(std::ceil(exact * (1 + ratio)))};
  }
  out.low = std::max<int64_t>(out.low, 1);
  return out;
}

Result<std::vector<Prompt>> random_prompts(const PromptOptions& options) {
  const std::vector<int32_t> usable = usable_ids(options);
  if (usable.empty()) {
    return no_vocabulary();
  }
  NIBBLE_ASSIGN_OR_RETURN(const Lengths lengths, lengths_of(options));
  Random random(options.seed);
  const LengthRange any{.low = 0, .high = std::ssize(usable) - 1};
  std::vector<int32_t> prefix;
  for (int64_t i = 0; i < options.prefix_len; ++i) {
    prefix.push_back(usable[static_cast<size_t>(uniform(random, any))]);
  }
  Starts starts(usable.size());
  std::vector<Prompt> prompts(static_cast<size_t>(options.count));
  for (size_t i = 0; i < prompts.size(); ++i) {
    const auto [at, stride] = starts.next(random, i);
    const auto length = static_cast<size_t>(uniform(random, lengths.input));
    prompts[i].output_len = uniform(random, lengths.output);
    std::vector<int32_t> ids = prefix;
    for (size_t j = 0; j < length; ++j) {
      ids.push_back(usable[(at + j * stride) % usable.size()]);
    }
    NIBBLE_RETURN_IF_ERROR(fill(prompts[i], std::move(ids), usable, options));
  }
  return prompts;
}

Result<std::vector<Prompt>> random_sharegpt_prompts(const PromptOptions& options) {
  if (options.tokenizer == nullptr) {
    return no_vocabulary();
  }
  PromptOptions source = options;
  source.fixed_output = 1;  // its answers do not matter
  NIBBLE_ASSIGN_OR_RETURN(std::vector<Prompt> prompts, sharegpt_prompts(source));
  NIBBLE_ASSIGN_OR_RETURN(const Lengths lengths, lengths_of(options));
  const std::vector<int32_t> usable = usable_ids(options);
  Random random(options.seed);
  for (Prompt& prompt : prompts) {
    NIBBLE_ASSIGN_OR_RETURN(std::vector<int32_t> ids,
                            options.tokenizer->encode(prompt.text, SpecialTokens::kPlain));
    const auto length = static_cast<size_t>(uniform(random, lengths.input));
    const size_t own = ids.size();
    ids.resize(length);
    for (size_t j = own; j < length; ++j) {
      ids[j] = ids[j - own];
    }
    prompt.text.clear();
    prompt.output_len = uniform(random, lengths.output);
    NIBBLE_RETURN_IF_ERROR(fill(prompt, std::move(ids), usable, options));
  }
  return prompts;
}

}  // namespace nibble
