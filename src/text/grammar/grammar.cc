#include "text/grammar/grammar.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <exception>
#include <list>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

#include <xgrammar/xgrammar.h>

#include "base/check.h"
#include "text/grammar/string_limits.h"

// What xgrammar says goes into errors; warnings are about texts of clients, who do not see them.
namespace xgrammar {

// NOLINTBEGIN(readability-identifier-naming): xgrammar declares them
[[noreturn]] void LogFatalImpl(const std::string& /*file*/,
                               int /*line*/,
                               const std::string& message) {
  throw std::runtime_error(message);
}
void LogMessageImpl(const std::string&, int, int, const std::string&) {}
// NOLINTEND(readability-identifier-naming)

}  // namespace xgrammar

namespace nibble {
namespace {

constexpr size_t kMostBytes = size_t{2} << 20;
constexpr std::chrono::seconds kMostMaskTime{1};
constexpr size_t kShownReason = 300;

std::string reason_of(const std::exception& error) {
  return std::string(error.what()).substr(0, kShownReason);
}

/// One answer. Where xgrammar fails, nothing may come any more, and accept() says why.
class Matcher final : public GrammarState {
 public:
  Matcher(const xgrammar::CompiledGrammar& grammar, std::optional<StringLimits> limits)
      : matcher_(grammar), limits_(limits) {}

  bool fill(std::span<uint32_t> mask) override {
    std::array<int64_t, 1> shape = {std::ssize(mask)};
    DLTensor tensor{.data = mask.data(),
                    .device = {kDLCPU, 0},
                    .ndim = 1,
                    .dtype = {kDLInt, 32, 1},
                    .shape = shape.data(),
                    .strides = nullptr,
                    .byte_offset = 0};
    const auto start = std::chrono::steady_clock::now();
    try {
      const bool some = matcher_.FillNextTokenBitmask(&tensor);
      if (limits_ && !some) {
        std::fill(mask.begin(), mask.end(), ~0U);
      }
      if (limits_) {
        limits_->apply(mask);
      }
      // Ambiguous grammars may take ever longer, while others wait.
      if (std::chrono::steady_clock::now() - start > kMostMaskTime) {
        failure_ = Status(StatusCode::kInvalidArgument,
                          "the grammar is too ambiguous: a mask of tokens took more than a second");
      }
      return some || limits_.has_value();
    } catch (const std::exception& error) {
      failure_ = Status(StatusCode::kInvalidArgument, "the grammar failed: " + reason_of(error));
    }
    std::fill(mask.begin(), mask.end(), 0U);
    return true;
  }

  Status accept(int32_t token) override {
    if (!failure_.ok()) {
      return failure_;
    }
    try {
      if (matcher_.AcceptToken(token)) {
        if (limits_) {
          limits_->accept(token, limit());
        }
        return {};
      }
    } catch (const std::exception& error) {
      return {StatusCode::kInvalidArgument, "the grammar failed: " + reason_of(error)};
    }
    return make_error(StatusCode::kInvalidArgument, "token {} is none that the grammar allows",
                      token);
  }

  [[nodiscard]] bool complete() const override { return matcher_.IsCompleted(); }

 private:
  /// Of the rule that the answer is in: ebnf_limited() says it as a temperature, which this engine
  /// has no other use for.
  [[nodiscard]] std::optional<int64_t> limit() const {
    const std::optional<float> value = matcher_.GetTemperature();
    return value ? std::optional(static_cast<int64_t>(*value)) : std::nullopt;
  }

  xgrammar::GrammarMatcher matcher_;
  std::optional<StringLimits> limits_;
  Status failure_;
};

class CompiledGrammar final : public Grammar {
 public:
  CompiledGrammar(xgrammar::CompiledGrammar grammar,
                  std::shared_ptr<const TokenStrings> tokens,
                  int64_t shortest_limit)
      : grammar_(std::move(grammar)),
        tokens_(std::move(tokens)),
        shortest_limit_(shortest_limit),
        bytes_(grammar_.MemorySizeBytes()) {}

  [[nodiscard]] std::unique_ptr<GrammarState> start() const override {
    return std::make_unique<Matcher>(
        grammar_, shortest_limit_ > 0 ? std::optional(StringLimits(*tokens_, shortest_limit_))
                                      : std::nullopt);
  }
  [[nodiscard]] size_t bytes() const override { return bytes_; }

 private:
  xgrammar::CompiledGrammar grammar_;
  std::shared_ptr<const TokenStrings> tokens_;
  int64_t shortest_limit_;
  size_t bytes_;
};

struct Vocabulary {
  std::vector<std::string> bytes;  // "": no text
  std::vector<int32_t> ends;
};

Vocabulary vocabulary_of(const Tokenizer& tokenizer,
                         int64_t vocab_size,
                         std::span<const int64_t> ends) {
  Vocabulary out;
  for (int32_t id = 0; id < vocab_size; ++id) {
    // No text has the byte 0xff: a special token comes where a grammar names it by its id alone.
    out.bytes.push_back((tokenizer.is_special(id) ? "\xff" : "") + tokenizer.token_bytes(id));
  }
  for (const int64_t end : ends) {
    if (end >= 0 && end < vocab_size) {
      out.bytes[static_cast<size_t>(end)].clear();
      out.ends.push_back(static_cast<int32_t>(end));
    }
  }
  CHECK(!out.ends.empty());
  return out;
}

}  // namespace

struct GrammarCompiler::Parts {
  using Entry = std::pair<std::string, std::shared_ptr<const Grammar>>;

  Parts(const Vocabulary& vocabulary, const GrammarOptions& options)
      : compiler(xgrammar::TokenizerInfo(vocabulary.bytes,
                                         xgrammar::VocabType::RAW,
                                         static_cast<int>(vocabulary.bytes.size()),
                                         vocabulary.ends),
                 options.threads,
                 /*cache_enabled=*/false),
        tokens(std::make_shared<const TokenStrings>(vocabulary.bytes)),
        limits(options) {}

  std::shared_ptr<const Grammar> find(std::string_view ebnf) {
    const std::lock_guard lock(cache_mutex);
    const auto found = places.find(ebnf);
    if (found == places.end()) {
      return nullptr;
    }
    used.splice(used.begin(), used, found->second);
    return found->second->second;
  }

  void keep(std::string_view ebnf, const std::shared_ptr<const Grammar>& grammar) {
    const std::lock_guard lock(cache_mutex);
    used.emplace_front(ebnf, grammar);
    places.emplace(used.front().first, used.begin());
    bytes += grammar->bytes() + ebnf.size();
    while (bytes > limits.cache_bytes || used.size() > limits.cache_count) {
      const Entry& last = used.back();
      bytes -= last.second->bytes() + last.first.size();
      places.erase(last.first);
      used.pop_back();
    }
  }

  std::mutex compile_mutex;
  xgrammar::GrammarCompiler compiler;
  const std::shared_ptr<const TokenStrings> tokens;
  const GrammarOptions limits;
  mutable std::mutex cache_mutex;                                           // guards what follows
  std::list<Entry> used;                                                    // the last one first
  std::unordered_map<std::string_view, std::list<Entry>::iterator> places;  // views into used
  size_t bytes = 0;
};

GrammarCompiler::GrammarCompiler(const Tokenizer& tokenizer,
                                 int64_t vocab_size,
                                 std::span<const int64_t> ends,
                                 const GrammarOptions& options)
    : parts_(std::make_unique<Parts>(vocabulary_of(tokenizer, vocab_size, ends), options)) {}

GrammarCompiler::~GrammarCompiler() = default;

std::shared_ptr<const Grammar> GrammarCompiler::known(const GrammarText& text) {
  return parts_->find(text.ebnf);
}

Result<std::shared_ptr<const Grammar>> GrammarCompiler::compile(const GrammarText& text) {
  const std::string& ebnf = text.ebnf;
  if (ebnf.size() > kMostBytes) {
    return make_error(StatusCode::kInvalidArgument,
                      "the grammar has {} bytes, but at most {} are allowed", ebnf.size(),
                      kMostBytes);
  }
  if (auto known = parts_->find(ebnf)) {
    return known;
  }
  const std::lock_guard lock(parts_->compile_mutex);
  if (auto known = parts_->find(ebnf)) {  // somebody else made it meanwhile
    return known;
  }
  try {
    auto made = std::make_shared<const CompiledGrammar>(
        parts_->compiler.CompileGrammar(ebnf, "root"), parts_->tokens, text.shortest_limit);
    std::vector<uint32_t> mask(static_cast<size_t>(mask_words(parts_->tokens->size())));
    if (made->start()->fill(mask) && std::ranges::all_of(mask, [](uint32_t w) { return w == 0; })) {
      return make_error(StatusCode::kInvalidArgument, "the grammar allows no text at all");
    }
    parts_->keep(ebnf, made);
    return std::shared_ptr<const Grammar>(std::move(made));
  } catch (const std::exception& error) {
    return make_error(StatusCode::kInvalidArgument, "the grammar is refused: {}", reason_of(error));
  }
}

GrammarCompiler::CacheSize GrammarCompiler::cache_size() const {
  const std::lock_guard lock(parts_->cache_mutex);
  return {parts_->used.size(), parts_->bytes};
}

}  // namespace nibble
