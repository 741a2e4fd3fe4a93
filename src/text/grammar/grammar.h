#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/status.h"
#include "ops/token_mask.h"
#include "text/tokenizer.h"

namespace nibble {

/// How far one answer has come in its grammar.
class GrammarState : public TokenConstraint {
 public:
  /// Whether the answer may end here.
  [[nodiscard]] virtual bool complete() const = 0;
};

/// A grammar made ready for a vocabulary. Immutable, thread-safe.
class Grammar {
 public:
  virtual ~Grammar() = default;
  /// The state of one answer, at its beginning. It allows end tokens where the answer may end, and
  /// nothing else where it must. It keeps what it needs.
  [[nodiscard]] virtual std::unique_ptr<GrammarState> start() const = 0;
  [[nodiscard]] virtual size_t bytes() const = 0;  // about
};

struct GrammarOptions {
  int threads = 1;                         // that make one grammar ready
  size_t cache_bytes = size_t{256} << 20;  // of grammars that are kept for the next request
  size_t cache_count = 1024;
};

/// A grammar in EBNF, whose first rule is `root`.
struct GrammarText {
  std::string ebnf;
  /// The smallest maxLength of an ebnf_limited() rule; 0 without any.
  int64_t shortest_limit = 0;
};

/// Makes grammars ready for one vocabulary and keeps those used last. The one place that knows
/// xgrammar. Thread-safe; grammars are made one after another.
class GrammarCompiler final {
 public:
  /// `vocab_size` is the model's, which may be larger than the tokenizer's; `ends` are the tokens
  /// that end an answer, at least one. Special tokens come where a grammar names them, and nowhere
  /// else.
  GrammarCompiler(const Tokenizer& tokenizer,
                  int64_t vocab_size,
                  std::span<const int64_t> ends,
                  const GrammarOptions& options = {});
  ~GrammarCompiler();

  /// The grammar of this text, if it is kept; else null.
  [[nodiscard]] std::shared_ptr<const Grammar> known(const GrammarText& text);
  /// Compiles a grammar; the same text again is a look-up.
  /// Errors: kInvalidArgument for text that is no grammar, with xgrammar's reason, and for one that
  /// is too large.
  Result<std::shared_ptr<const Grammar>> compile(const GrammarText& text);
  /// Grammars that are kept, and about their bytes.
  struct CacheSize {
    size_t count = 0;
    size_t bytes = 0;
  };
  [[nodiscard]] CacheSize cache_size() const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace nibble
