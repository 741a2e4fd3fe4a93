#include "eval/gsm8k.h"

#include <algorithm>

#include "base/file.h"
#include "base/json_lines.h"

namespace nibble {
namespace {

constexpr std::string_view kMark = "#### ";

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Characters from `at` on that `accepts` takes.
template <typename Accepts>
size_t run_of(std::string_view text, size_t at, const Accepts& accepts) {
  size_t length = 0;
  while (at + length < text.size() && accepts(text[at + length])) {
    ++length;
  }
  return length;
}

// Length of what (-?[$0-9.,]{2,})|(-?[0-9]+) matches at `at`; 0: nothing.
size_t number_at(std::string_view text, size_t at) {
  const auto loose = [](char c) { return is_digit(c) || c == '$' || c == '.' || c == ','; };
  const size_t sign = text[at] == '-' ? 1 : 0;
  if (const size_t length = run_of(text, at + sign, loose); length >= 2) {
    return sign + length;
  }
  const size_t digits = run_of(text, at + sign, is_digit);
  return digits > 0 ? sign + digits : 0;
}

// As lm-eval's exact_match changes both sides.
std::string normalized(std::string_view text) {
  const size_t mark = text.rfind(kMark);
  // Commas and dollar signs go first, which makes no mark.
  std::string out;
  for (const char c : text.substr(mark == std::string_view::npos ? 0 : mark + kMark.size())) {
    if (c != ',' && c != '$') {
      out += c >= 'A' && c <= 'Z' ? static_cast<char>(c + ('a' - 'A')) : c;
    }
  }
  if (out.ends_with('.')) {
    out.pop_back();
  }
  return out;
}

}  // namespace

Result<std::vector<GsmProblem>> read_gsm8k(const std::string& path, int64_t limit) {
  std::vector<GsmProblem> problems;
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_file(path));
  const JsonLines lines{.text = text, .where = path, .limit = limit};
  NIBBLE_RETURN_IF_ERROR(for_each_json_line(lines, [&](const Json& json) -> Status {
    const JsonReader reader(json, "the problem");
    GsmProblem problem;
    NIBBLE_ASSIGN_OR_RETURN(problem.question, reader.required_string("question"));
    NIBBLE_ASSIGN_OR_RETURN(problem.answer, reader.required_string("answer"));
    if (!strict_answer(problem.answer)) {
      return make_error(StatusCode::kCorrupt, "field answer: has no number after '{}'", kMark);
    }
    problems.push_back(std::move(problem));
    return {};
  }));
  if (problems.empty()) {
    return make_error(StatusCode::kInvalidArgument, "{}: has no problems", path);
  }
  return problems;
}

std::string gsm8k_prompt(std::span<const GsmProblem> examples, const GsmProblem& problem) {
  std::string prompt;
  for (const GsmProblem& example : examples) {
    prompt += "Question: " + example.question + "\nAnswer: " + example.answer + "\n\n";
  }
  return prompt + "Question: " + problem.question + "\nAnswer:";
}

std::vector<std::string> gsm8k_stops() { return {"Question:", "</s>", "<|im_end|>"}; }

std::optional<std::string> strict_answer(std::string_view text) {
  const auto part = [](char c) { return is_digit(c) || c == '.' || c == ','; };
  for (size_t at = text.find(kMark); at != std::string_view::npos; at = text.find(kMark, at + 1)) {
    const size_t begin = at + kMark.size();
    const size_t sign = begin < text.size() && text[begin] == '-' ? 1 : 0;
    if (const size_t length = run_of(text, begin + sign, part); length > 0) {
      return std::string(text.substr(begin, sign + length));
    }
  }
  return std::nullopt;
}

std::optional<std::string> flexible_answer(std::string_view text) {
  std::optional<std::string> last;
  for (size_t at = 0; at < text.size();) {
    const size_t length = number_at(text, at);
    if (length > 0) {
      last = std::string(text.substr(at, length));
    }
    at += std::max<size_t>(length, 1);
  }
  return last;
}

bool equals_reference(const std::optional<std::string>& answer, std::string_view reference) {
  return answer && normalized(*answer) == normalized(reference);
}

}  // namespace nibble
