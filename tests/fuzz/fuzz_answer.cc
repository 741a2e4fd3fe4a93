// Takes the input apart as an answer of a form that its first byte chooses: no crash, no leak,
// calls are whole, and the pieces do not depend on how the text is cut. Bytes 0 and 1 behind the
// first are special tokens.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "base/json.h"
#include "base/log.h"
#include "text/answer/answer_parser.h"

namespace {

using nibble::AnswerForm;
using nibble::AnswerParser;
using nibble::AnswerPiece;
using nibble::ReasoningForm;
using nibble::ToolForm;

constexpr AnswerForm kForms[] = {
    {ReasoningForm::kThink, ToolForm::kHermes},    {ReasoningForm::kNone, ToolForm::kLlama},
    {ReasoningForm::kMistral, ToolForm::kMistral}, {ReasoningForm::kThink, ToolForm::kKimi},
    {ReasoningForm::kThink, ToolForm::kDeepSeek},  {ReasoningForm::kHarmony, ToolForm::kHarmony},
};
constexpr std::string_view kTokens[] = {"<think>",
                                        "</think>",
                                        "<tool_call>",
                                        "</tool_call>",
                                        "<|python_tag|>",
                                        "[TOOL_CALLS]",
                                        "[ARGS]",
                                        "<|channel|>",
                                        "<|message|>",
                                        "<|start|>",
                                        "<|call|>",
                                        "<|tool_call_begin|>",
                                        "<|tool_call_argument_begin|>",
                                        "<|tool_call_end|>",
                                        "<｜tool▁call▁begin｜>",
                                        "<｜tool▁sep｜>",
                                        "<｜tool▁call▁end｜>"};

void check(bool holds) {
  if (!holds) {
    std::abort();
  }
}

std::string parse(std::string_view text, AnswerForm form, size_t step) {
  AnswerParser parser({.form = form, .functions = {"f", "add"}});
  std::string held;
  const auto flush = [&] {
    for (size_t i = 0; i < held.size(); i += step) {
      parser.push_text(std::string_view(held).substr(i, step));
    }
    held.clear();
  };
  for (size_t i = 0; i < text.size(); ++i) {
    if (static_cast<uint8_t>(text[i]) > 1 || i + 1 == text.size()) {
      held += text[i];
      continue;
    }
    flush();
    parser.push_special(kTokens[static_cast<uint8_t>(text[++i]) % std::size(kTokens)]);
  }
  flush();
  parser.finish();
  std::string out;
  const auto pieces = nibble::joined_pieces(parser.take());
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (pieces[i].kind == AnswerPiece::Kind::kCallBegin) {
      check(i + 2 < pieces.size() && pieces[i + 1].kind == AnswerPiece::Kind::kArguments &&
            pieces[i + 2].kind == AnswerPiece::Kind::kCallEnd);
      const auto arguments = nibble::Json::parse(pieces[i + 1].text);
      check(arguments.ok() && arguments->is_object());
    }
    out += static_cast<char>('0' + static_cast<int>(pieces[i].kind)) + pieces[i].text + '\x01';
  }
  return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const bool quiet = (nibble::set_log_level(nibble::LogLevel::kError), true);
  if (size == 0 || !quiet) {
    return 0;
  }
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  const AnswerForm form = kForms[data[0] % std::size(kForms)];
  check(parse(text, form, 1) == parse(text, form, size));
  return 0;
}
