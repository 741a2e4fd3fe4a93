#include "text/answer/answer_parser.h"

#include <utility>

#include "text/answer/bracketed_calls.h"
#include "text/answer/harmony_stage.h"
#include "text/answer/llama_calls.h"
#include "text/answer/plain_stage.h"
#include "text/answer/think_stage.h"

namespace nibble {
namespace {

CallSyntax syntax_of(ToolForm form) {
  switch (form) {
    case ToolForm::kKimi:
      return {.begin = "<|tool_call_begin|>",
              .end = "<|tool_call_end|>",
              .inner = {"<|tool_call_argument_begin|>"},
              .ignored = {"<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"},
              .parse = parse_kimi_call};
    case ToolForm::kDeepSeek:
      return {.begin = "<｜tool▁call▁begin｜>",
              .end = "<｜tool▁call▁end｜>",
              .inner = {"<｜tool▁sep｜>"},
              .ignored = {"<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"},
              .parse = parse_deepseek_call};
    case ToolForm::kMistral:
      return {.begin = "[TOOL_CALLS]",
              .end = "",
              .inner = {"[CALL_ID]", "[ARGS]"},
              .ignored = {},
              .parse = parse_mistral_calls};
    default:
      return {.begin = "<tool_call>",
              .end = "</tool_call>",
              .inner = {},
              .ignored = {},
              .parse = parse_hermes_call};
  }
}

std::unique_ptr<AnswerStage> make_calls(const AnswerParser::Options& options,
                                        AnswerPieces& pieces) {
  if (options.form.tools == ToolForm::kNone || options.functions.empty()) {
    return std::make_unique<PlainStage>(pieces);
  }
  if (options.form.tools == ToolForm::kLlama) {
    return std::make_unique<LlamaCalls>(options.functions, pieces);
  }
  return std::make_unique<BracketedCalls>(syntax_of(options.form.tools), pieces);
}

}  // namespace

AnswerParser::AnswerParser(const Options& options)
    : pieces_(std::make_unique<AnswerPieces>(options.tokens)) {
  if (options.form.reasoning == ReasoningForm::kHarmony ||
      options.form.tools == ToolForm::kHarmony) {
    auto stage = std::make_unique<HarmonyStage>(*pieces_);
    harmony_ = stage.get();
    first_storage_ = std::move(stage);
    first_ = first_storage_.get();
    return;
  }
  calls_ = make_calls(options, *pieces_);
  first_ = calls_.get();
  if (options.form.reasoning != ReasoningForm::kNone) {
    const ThinkStage::Markers markers = options.form.reasoning == ReasoningForm::kMistral
                                            ? ThinkStage::Markers{"[THINK]", "[/THINK]"}
                                            : ThinkStage::Markers{"<think>", "</think>"};
    auto stage = std::make_unique<ThinkStage>(
        markers, options.thinks_already ? ThinkStage::Begin::kInside : ThinkStage::Begin::kOutside,
        *pieces_, *calls_);
    think_ = stage.get();
    first_storage_ = std::move(stage);
    first_ = first_storage_.get();
  }
}

AnswerParser::~AnswerParser() = default;
AnswerParser::AnswerParser(AnswerParser&&) noexcept = default;

bool AnswerParser::thinks() const {
  return (think_ != nullptr && think_->inside()) || (harmony_ != nullptr && harmony_->thinks());
}

}  // namespace nibble
