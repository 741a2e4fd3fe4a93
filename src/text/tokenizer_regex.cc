#include "text/tokenizer_regex.h"

#include <cctype>
#include <cstdint>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "base/log.h"
#include "text/tokenizer_utf8.h"

namespace nibble {
namespace {

// Unicode White_Space, as members of a class, and everything else.
constexpr std::string_view kSpace =
    "\\x09-\\x0D\\x20\\x85\\xA0\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}\\x{205F}"
    "\\x{3000}";
constexpr std::string_view kNotSpace =
    "\\x00-\\x08\\x0E-\\x1F\\x21-\\x84\\x86-\\x9F\\xA1-\\x{167F}\\x{1681}-\\x{1FFF}"
    "\\x{200B}-\\x{2027}\\x{202A}-\\x{202E}\\x{2030}-\\x{205E}\\x{2060}-\\x{2FFF}"
    "\\x{3001}-\\x{10FFFF}";

// Of one match: half a second of backtracking, 3 without JIT (measured with (a|aa)+$ on
// "aaaa...!").
constexpr uint32_t kMatchLimit = 100U << 20;
constexpr size_t kFirstStackBytes = 64 << 10;
// A 4 MB word under Kimi's pattern needs more than the default; see docs/dependencies.md.
constexpr size_t kLargestStackBytes = size_t{512} << 20;

class Translator final {
 public:
  explicit Translator(std::string_view pattern) : pattern_(pattern) {}

  Result<std::string> run() {
    std::string out;
    while (at_ < pattern_.size()) {
      if (pattern_[at_] == '\\') {
        append_escape(out, Place::kOutside);
      } else if (pattern_[at_] == '[') {
        NIBBLE_ASSIGN_OR_RETURN(std::string translated, translate_class());
        out += translated;
      } else {
        out += pattern_[at_++];
      }
    }
    return out;
  }

 private:
  enum class Place { kOutside, kInClass };

  // at_ is on the backslash.
  void append_escape(std::string& out, Place place) {
    const char next = at_ + 1 < pattern_.size() ? pattern_[at_ + 1] : '\0';
    if (next == 's' || next == 'S') {
      const std::string_view members = next == 's' ? kSpace : kNotSpace;
      out += place == Place::kInClass ? std::string(members) : fmt::format("[{}]", members);
      at_ += 2;
      return;
    }
    const size_t close = pattern_.find('}', at_);
    if ((next == 'p' || next == 'P') && at_ + 2 < pattern_.size() && pattern_[at_ + 2] == '{' &&
        close != std::string_view::npos) {
      append_property(out, next, pattern_.substr(at_ + 3, close - at_ - 3));
      at_ = close + 1;
      return;
    }
    out += pattern_.substr(at_, 2);
    at_ += 2;
  }

  static void append_property(std::string& out, char letter, std::string_view name) {
    bool negated = letter == 'P';
    if (!name.empty() && name[0] == '^') {
      negated = !negated;
      name.remove_prefix(1);
    }
    // Names of one or two letters are general categories; longer ones without a prefix are scripts.
    const bool is_script = name.size() > 2 && name.find_first_of(":=") == std::string_view::npos &&
                           name != "Any" && name[0] != 'X';
    out += fmt::format("\\{}{{{}{}}}", negated ? 'P' : 'p', is_script ? "sc:" : "", name);
  }

  // at_ is on the opening bracket; returns a class or a lookahead with a class.
  Result<std::string> translate_class() {
    std::string members = "[";
    std::string conditions;
    ++at_;
    if (take('^')) members += '^';
    if (take(']')) members += "\\]";
    while (at_ < pattern_.size() && pattern_[at_] != ']') {
      if (pattern_.substr(at_, 2) == "&&") {
        NIBBLE_RETURN_IF_ERROR(append_condition(conditions));
      } else if (pattern_.substr(at_, 2) == "[:") {
        const size_t close = pattern_.find(":]", at_);
        if (close == std::string_view::npos) break;
        members += pattern_.substr(at_, close + 2 - at_);
        at_ = close + 2;
      } else if (pattern_[at_] == '[') {
        return make_error(StatusCode::kUnsupported,
                          "regular expression: nested class at byte {} of '{}'; only && [...] is "
                          "supported inside a class",
                          at_, pattern_);
      } else if (pattern_[at_] == '\\') {
        append_escape(members, Place::kInClass);
      } else {
        members += pattern_[at_++];
      }
    }
    if (!take(']')) {
      return make_error(StatusCode::kCorrupt, "regular expression: class never closes in '{}'",
                        pattern_);
    }
    if (!conditions.empty() && members.starts_with("[^")) {
      return make_error(StatusCode::kUnsupported,
                        "regular expression: negated intersection of classes in '{}'", pattern_);
    }
    members += ']';
    return conditions.empty() ? members : fmt::format("(?:{}{})", conditions, members);
  }

  // at_ is on "&&"; what follows must be a class.
  Status append_condition(std::string& conditions) {
    at_ += 2;
    if (at_ >= pattern_.size() || pattern_[at_] != '[' || ++depth_ > kDeepest) {
      return make_error(StatusCode::kUnsupported,
                        "regular expression: && at byte {} of '{}' is not followed by a class", at_,
                        pattern_);
    }
    const bool negated = at_ + 1 < pattern_.size() && pattern_[at_ + 1] == '^';
    NIBBLE_ASSIGN_OR_RETURN(std::string operand, translate_class());
    --depth_;
    if (negated) operand.erase(1, 1);
    conditions += fmt::format("(?{}{})", negated ? '!' : '=', operand);
    return {};
  }

  bool take(char expected) {
    if (at_ < pattern_.size() && pattern_[at_] == expected) {
      ++at_;
      return true;
    }
    return false;
  }

  static constexpr int kDeepest = 16;

  std::string_view pattern_;
  size_t at_ = 0;
  int depth_ = 0;
};

template <auto free_function>
struct Deleter {
  template <typename T>
  void operator()(T* object) const {
    free_function(object);
  }
};
using MatchData = std::unique_ptr<pcre2_match_data, Deleter<pcre2_match_data_free>>;
using MatchContext = std::unique_ptr<pcre2_match_context, Deleter<pcre2_match_context_free>>;
using JitStack = std::unique_ptr<pcre2_jit_stack, Deleter<pcre2_jit_stack_free>>;

std::string error_text(int error) {
  PCRE2_UCHAR message[256] = {};
  pcre2_get_error_message(error, message, sizeof message);
  return reinterpret_cast<const char*>(message);
}

// One search over one text; grows its stack on the first match that needs it.
class Search final {
 public:
  Search(const pcre2_code* code, std::string_view text)
      : code_(code),
        text_(text),
        data_(pcre2_match_data_create_from_pattern(code, nullptr)),
        context_(pcre2_match_context_create(nullptr)) {
    pcre2_set_match_limit(context_.get(), kMatchLimit);
    pcre2_set_heap_limit(context_.get(), UINT32_MAX);
  }

  // First match at or after `from`: that of begin() and end(), PCRE2_ERROR_NOMATCH if there is
  // none, or the error that ended the search.
  int next(size_t from) {
    int rc = attempt(from, 0);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT && !stack_) {
      stack_.reset(pcre2_jit_stack_create(kFirstStackBytes, kLargestStackBytes, nullptr));
      if (stack_) {
        pcre2_jit_stack_assign(context_.get(), nullptr, stack_.get());
        rc = attempt(from, 0);
      }
    }
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT) {
      rc = attempt(from, PCRE2_NO_JIT);
    }
    return rc;
  }

  [[nodiscard]] size_t begin() const { return pcre2_get_ovector_pointer(data_.get())[0]; }
  [[nodiscard]] size_t end() const { return pcre2_get_ovector_pointer(data_.get())[1]; }

 private:
  int attempt(size_t from, uint32_t options) {
    return pcre2_match(code_, reinterpret_cast<PCRE2_SPTR>(text_.data()), text_.size(), from,
                       options | PCRE2_NO_UTF_CHECK, data_.get(), context_.get());
  }

  const pcre2_code* code_;
  std::string_view text_;
  MatchData data_;
  MatchContext context_;
  JitStack stack_;
};

}  // namespace

struct Regex::Code {
  std::string where;
  std::unique_ptr<pcre2_code, Deleter<pcre2_code_free>> compiled;
};

Result<std::string> translate_regex(std::string_view pattern) { return Translator(pattern).run(); }

Result<Regex> Regex::compile(std::string_view pattern, std::string_view where) {
  Result<std::string> translated = translate_regex(pattern);
  if (!translated.ok()) {
    return translated.status().with_context(where);
  }
  int error = 0;
  PCRE2_SIZE offset = 0;
  auto code = std::make_shared<Code>();
  code->where = where;
  code->compiled.reset(
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated->data()), translated->size(),
                    PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &offset, nullptr));
  if (!code->compiled) {
    return make_error(StatusCode::kCorrupt,
                      "{}: regular expression '{}' does not compile: {} (byte {} of '{}')", where,
                      pattern, error_text(error), offset, *translated);
  }
  // Without JIT (a hardened kernel) matching still works, about ten times slower.
  if (pcre2_jit_compile(code->compiled.get(), PCRE2_JIT_COMPLETE) != 0) {
    NIBBLE_LOG(kWarning, "{}: regular expression runs without JIT", where);
  }
  return Regex(std::move(code));
}

Status Regex::for_each_match(TextPart part, const MatchVisitor& visit) const {
  const std::string_view text = part.text;
  if (text.empty()) {
    return {};
  }
  Search search(code_->compiled.get(), text);
  size_t from = 0;
  while (from < text.size()) {
    const int rc = search.next(from);
    if (rc == PCRE2_ERROR_NOMATCH) {
      break;
    }
    if (rc < 0) {
      return make_error(StatusCode::kInvalidArgument,
                        "{}: the regular expression gives up near byte {} of the text ({}); cut "
                        "the text there, or correct the expression",
                        code_->where, part.at + from, error_text(rc));
    }
    const size_t begin = search.begin();
    const size_t end = search.end();
    if (end > begin) {
      visit(begin, end);
      from = end;
    } else {
      if (begin >= text.size()) break;
      from = begin + utf8_step(text, begin).length;
    }
  }
  return {};
}

}  // namespace nibble
