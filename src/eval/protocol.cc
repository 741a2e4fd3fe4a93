#include "eval/protocol.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "eval/wikitext.h"

namespace nibble {
namespace {

constexpr std::array<std::pair<Protocol, std::string_view>, 4> kNames = {{
    {Protocol::kOurs, "ours"},
    {Protocol::kGptq, "gptq"},
    {Protocol::kLlamaCpp, "llama.cpp"},
    {Protocol::kLmEval, "lm-eval"},
}};

using Tokens = std::vector<int32_t>;

Tokens part_of(const Tokens& tokens, int64_t begin, int64_t end) {
  return {tokens.begin() + begin, tokens.begin() + end};
}

Status too_short(int64_t has, int64_t needs, std::string_view why) {
  return make_error(StatusCode::kInvalidArgument, "the text has {} tokens, but {} are needed{}",
                    has, needs, why);
}

// Whole windows; what is left at the end is dropped.
std::vector<EvalWindow> whole_windows(const Tokens& tokens, int64_t window) {
  std::vector<EvalWindow> windows;
  for (int64_t begin = 0; begin + window <= std::ssize(tokens); begin += window) {
    windows.push_back({.tokens = part_of(tokens, begin, begin + window)});
  }
  return windows;
}

Result<Tokens> plan_ours(std::string_view text,
                         const Tokenizer& tokenizer,
                         int64_t window,
                         std::vector<EvalWindow>& windows) {
  NIBBLE_ASSIGN_OR_RETURN(Tokens tokens, tokenizer.encode(text, SpecialTokens::kPlain));
  if (tokens.size() < 2) {
    return make_error(StatusCode::kInvalidArgument, "has {} tokens, but at least 2 are needed",
                      tokens.size());
  }
  windows = whole_windows(tokens, std::min(window, std::ssize(tokens)));
  return tokens;
}

Result<Tokens> plan_gptq(std::string_view text,
                         const Tokenizer& tokenizer,
                         int64_t window,
                         std::vector<EvalWindow>& windows) {
  NIBBLE_ASSIGN_OR_RETURN(Tokens tokens, tokenizer.encode_prompt(joined_lines(text)));
  if (std::ssize(tokens) < window) {
    return too_short(std::ssize(tokens), window, " for one window; see --window");
  }
  windows = whole_windows(tokens, window);
  return tokens;
}

Result<Tokens> plan_llama_cpp(std::string_view text,
                              const Tokenizer& tokenizer,
                              int64_t window,
                              std::vector<EvalWindow>& windows) {
  if (window < 3) {
    return make_error(StatusCode::kInvalidArgument,
                      "--window {}: its second half has no token to score", window);
  }
  if (text.ends_with('\n')) {  // llama.cpp takes one newline off the end of a file
    text.remove_suffix(1);
  }
  NIBBLE_ASSIGN_OR_RETURN(Tokens tokens, tokenizer.encode(text, SpecialTokens::kPlain));
  const Tokens& prefix = tokenizer.prompt_prefix();
  tokens.insert(tokens.begin(), prefix.begin(), prefix.end());
  if (std::ssize(tokens) < 2 * window) {
    return too_short(std::ssize(tokens), 2 * window,
                     ", two windows, as in llama.cpp; see --window");
  }
  windows = whole_windows(tokens, window);
  for (EvalWindow& one : windows) {
    if (!prefix.empty()) {
      one.tokens.front() = prefix.front();
    }
    one.first_scored = window / 2 + 1;
  }
  return tokens;
}

// One page: the first window begins with `prefix` and later ones with the token before what they
// score; the last is filled up with context.
void roll_over(const Tokens& page, int32_t prefix, int64_t window, std::vector<EvalWindow>& out) {
  Tokens tokens = page;
  tokens.insert(tokens.begin(), prefix);
  const int64_t size = std::ssize(tokens);
  for (int64_t done = 1; done < size;) {
    const int64_t end = std::min(done + window, size);
    const int64_t begin = std::max<int64_t>(end - window - 1, 0);
    out.push_back({.tokens = part_of(tokens, begin, end), .first_scored = done - begin});
    done = end;
  }
}

Result<Tokens> plan_lm_eval(std::string_view text,
                            const Tokenizer& tokenizer,
                            int64_t window,
                            std::vector<EvalWindow>& windows) {
  const auto prefix = tokenizer.bos_id() ? tokenizer.bos_id() : tokenizer.eos_id();
  if (!prefix) {
    return make_error(StatusCode::kInvalidArgument,
                      "the tokenizer has neither a BOS nor an EOS token, with which lm-eval begins "
                      "every page; use another --protocol");
  }
  Tokens all;
  for (const std::string_view page : wikitext_pages(text)) {
    NIBBLE_ASSIGN_OR_RETURN(const Tokens tokens,
                            tokenizer.encode_prompt(detokenized_wikitext(page)));
    roll_over(tokens, *prefix, window, windows);
    all.insert(all.end(), tokens.begin(), tokens.end());
  }
  if (all.empty()) {
    return too_short(0, 1, "");
  }
  return all;
}

Result<Tokens> plan(std::string_view text,
                    const Tokenizer& tokenizer,
                    std::pair<Protocol, int64_t> how,
                    std::vector<EvalWindow>& windows) {
  switch (how.first) {
    case Protocol::kGptq:
      return plan_gptq(text, tokenizer, how.second, windows);
    case Protocol::kLlamaCpp:
      return plan_llama_cpp(text, tokenizer, how.second, windows);
    case Protocol::kLmEval:
      return plan_lm_eval(text, tokenizer, how.second, windows);
    case Protocol::kOurs:
      break;
  }
  return plan_ours(text, tokenizer, how.second, windows);
}

}  // namespace

std::string_view protocol_name(Protocol protocol) {
  const auto* found =
      std::ranges::find(kNames, protocol, &std::pair<Protocol, std::string_view>::first);
  return found->second;
}

std::vector<std::string> protocol_names() {
  std::vector<std::string> names;
  std::ranges::transform(kNames, std::back_inserter(names),
                         [](const auto& entry) { return std::string(entry.second); });
  return names;
}

Result<Protocol> parse_protocol(std::string_view name) {
  for (const auto& [protocol, known] : kNames) {
    if (name == known) {
      return protocol;
    }
  }
  return make_error(StatusCode::kInvalidArgument,
                    "--protocol {}: must be ours, gptq, llama.cpp or lm-eval", name);
}

int64_t default_window(Protocol protocol, int64_t context) {
  switch (protocol) {
    case Protocol::kGptq:
      return std::min<int64_t>(2048, context);
    case Protocol::kLmEval:
      return context;
    default:
      return std::min<int64_t>(512, context);
  }
}

int64_t EvalText::scored() const {
  int64_t sum = 0;
  for (const EvalWindow& window : windows) {
    sum += window.scored();
  }
  return sum;
}

Result<EvalText> plan_windows(std::string_view text,
                              const Tokenizer& tokenizer,
                              Protocol protocol,
                              int64_t window) {
  EvalText out;
  NIBBLE_ASSIGN_OR_RETURN(const Tokens tokens,
                          plan(text, tokenizer, {protocol, window}, out.windows));
  out.tokens = std::ssize(tokens);
  out.bytes = std::ssize(text);
  for (const std::string_view page : wikitext_pages(text)) {
    out.words += words_of(page);
  }
  return out;
}

std::string joined_lines(std::string_view text) {
  std::string out;
  bool first = true;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    const bool ended = line.size() < text.size();
    if (!std::exchange(first, false)) {
      out += "\n\n";
    }
    if (line.find_first_not_of(" \t\r\v\f") != std::string_view::npos) {
      out += line;
      out += ended ? "\n" : "";
    }
    text.remove_prefix(line.size() + (ended ? 1 : 0));
  }
  return out;
}

}  // namespace nibble
