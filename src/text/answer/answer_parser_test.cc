#include "text/answer/answer_parser.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <random>
#include <sstream>

#include <gtest/gtest.h>

#include "base/json.h"
#include "text/chat_template.h"

namespace nibble {
namespace {

using Kind = AnswerPiece::Kind;

struct Transcript {
  std::string name;
  AnswerForm form;
  bool thinks_already = false;
  std::string text;
  std::vector<AnswerPiece> pieces;
};

constexpr std::array<std::string_view, 24> kSpecials = {"<|channel|>",
                                                        "<|message|>",
                                                        "<|start|>",
                                                        "<|end|>",
                                                        "<|call|>",
                                                        "<|return|>",
                                                        "<|constrain|>",
                                                        "<|python_tag|>",
                                                        "[TOOL_CALLS]",
                                                        "[CALL_ID]",
                                                        "[ARGS]",
                                                        "<|tool_calls_section_begin|>",
                                                        "<|tool_calls_section_end|>",
                                                        "<|tool_call_begin|>",
                                                        "<|tool_call_argument_begin|>",
                                                        "<|tool_call_end|>",
                                                        "<｜tool▁calls▁begin｜>",
                                                        "<｜tool▁calls▁end｜>",
                                                        "<｜tool▁call▁begin｜>",
                                                        "<｜tool▁call▁end｜>",
                                                        "<｜tool▁sep｜>",
                                                        "<|im_end|>",
                                                        "<｜end▁of▁sentence｜>",
                                                        "<|eot_id|>"};

/// Text and special tokens of a transcript, in order; tokens are marked.
std::vector<std::pair<bool, std::string>> atoms_of(std::string_view text) {
  std::vector<std::pair<bool, std::string>> atoms;
  while (!text.empty()) {
    const auto* token = std::ranges::find_if(
        kSpecials, [text](std::string_view each) { return text.starts_with(each); });
    if (token != kSpecials.end()) {
      atoms.emplace_back(true, *token);
      text.remove_prefix(token->size());
      continue;
    }
    if (atoms.empty() || atoms.back().first) {
      atoms.emplace_back(false, "");
    }
    atoms.back().second += text.front();
    text.remove_prefix(1);
  }
  return atoms;
}

/// Bytes of text at a time; 0: all between two special tokens.
std::vector<AnswerPiece> parse(const Transcript& transcript, std::string_view text, size_t step) {
  AnswerParser parser({.form = transcript.form,
                       .thinks_already = transcript.thinks_already,
                       .functions = {"get_weather", "add"}});
  std::vector<AnswerPiece> pieces;
  const auto take = [&] {
    for (AnswerPiece& piece : parser.take()) {
      pieces.push_back(std::move(piece));
    }
  };
  for (const auto& [special, content] : atoms_of(text)) {
    if (special) {
      parser.push_special(content);
      take();
      continue;
    }
    const size_t width = step == 0 ? content.size() : step;
    for (size_t i = 0; i < content.size(); i += width) {
      parser.push_text(std::string_view(content).substr(i, width));
      take();
    }
  }
  parser.finish();
  take();
  return joined_pieces(std::move(pieces));
}

std::vector<AnswerPiece> call(std::string name, std::string arguments, std::string id = "") {
  return {{Kind::kCallBegin, std::move(name), std::move(id)},
          {Kind::kArguments, std::move(arguments)},
          {Kind::kCallEnd, ""}};
}

std::vector<AnswerPiece> operator+(std::vector<AnswerPiece> a, const std::vector<AnswerPiece>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

constexpr AnswerForm kHermes{ReasoningForm::kThink, ToolForm::kHermes};
constexpr AnswerForm kLlama{ReasoningForm::kNone, ToolForm::kLlama};
constexpr AnswerForm kMistral{ReasoningForm::kMistral, ToolForm::kMistral};
constexpr AnswerForm kKimi{ReasoningForm::kThink, ToolForm::kKimi};
constexpr AnswerForm kDeepSeek{ReasoningForm::kThink, ToolForm::kDeepSeek};
constexpr AnswerForm kHarmony{ReasoningForm::kHarmony, ToolForm::kHarmony};
const std::string kZurich = R"({"city": "Zürich"})";

std::vector<Transcript> hermes_transcripts() {
  return {
      {"content",
       kHermes,
       false,
       " Hello <b>you</b>. \n",
       {{Kind::kContent, " Hello <b>you</b>. \n"}}},
      {"thought",
       kHermes,
       false,
       "<think>\nI see.\n\nYes\n</think>\n\nHello",
       {{Kind::kReasoning, "I see.\n\nYes"}, {Kind::kContent, "Hello"}}},
      {"thought that the prompt opened",
       kHermes,
       true,
       "so\n</think>\nHi <think>",
       {{Kind::kReasoning, "so"}, {Kind::kContent, "Hi <think>"}}},
      {"thought without end", kHermes, false, "<think>never", {{Kind::kReasoning, "never"}}},
      {"two calls", kHermes, false,
       "Let me see.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"a "
       "</tool_call> b\"}}\n</tool_call>\n<tool_call>{\"name\":\"add\"}</tool_call>\n",
       std::vector<AnswerPiece>{{Kind::kContent, "Let me see."}} +
           call("get_weather", R"({"city":"a </tool_call> b"})") + call("add", "{}")},
      {"a call without its end", kHermes, false,
       "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1.5}}",
       call("add", R"({"a":1.5})")},
      {"half a call",
       kHermes,
       false,
       "<tool_call>\n{\"name\": \"add\", \"argum",
       {{Kind::kContent, "<tool_call>\n{\"name\": \"add\", \"argum"}}},
      {"arguments that are no object",
       kHermes,
       false,
       "x <tool_call>{\"name\": \"add\", \"arguments\": [1]}</tool_call> y",
       {{Kind::kContent, "x<tool_call>{\"name\": \"add\", \"arguments\": [1]}</tool_call> y"}}},
  };
}

std::vector<Transcript> llama_and_mistral_transcripts() {
  return {
      {"call", kLlama, false, "{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Zürich\"}}",
       call("get_weather", R"({"city":"Zürich"})")},
      {"two calls with a tag", kLlama, false,
       "<|python_tag|>{\"name\": \"add\", \"parameters\": {}}; {\"name\": \"add\", "
       "\"parameters\": {\"a\": \"}\"}}",
       call("add", "{}") + call("add", R"({"a":"}"})")},
      {"JSON that is no call",
       kLlama,
       false,
       "{\"name\": \"Bob\", \"age\": 7}",
       {{Kind::kContent, "{\"name\": \"Bob\", \"age\": 7}"}}},
      {"content", kLlama, false, "< Hello", {{Kind::kContent, "< Hello"}}},
      {"list", kMistral, false,
       "[TOOL_CALLS][{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Zürich\"}, \"id\": "
       "\"call00001\"}, {\"name\": \"add\", \"arguments\": {}}]",
       call("get_weather", R"({"city":"Zürich"})", "call00001") + call("add", "{}")},
      {"names and thoughts", kMistral, false,
       "[THINK]Well[/THINK]Sure. [TOOL_CALLS]get_weather[CALL_ID]call00001[ARGS]" + kZurich +
           "[TOOL_CALLS]add[ARGS]{}",
       std::vector<AnswerPiece>{{Kind::kReasoning, "Well"}, {Kind::kContent, "Sure."}} +
           call("get_weather", kZurich, "call00001") + call("add", "{}")},
      {"damaged",
       kMistral,
       false,
       "[TOOL_CALLS]add[ARGS]{",
       {{Kind::kContent, "[TOOL_CALLS]add[ARGS]{"}}},
  };
}

std::vector<Transcript> kimi_and_deepseek_transcripts() {
  return {
      {"calls", kKimi, false,
       "<think>hm</"
       "think>Both:<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
       "<|tool_call_argument_begin|>" +
           kZurich +
           "<|tool_call_end|><|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>"
           "{\"a\": 1}<|tool_call_end|><|tool_calls_section_end|>",
       std::vector<AnswerPiece>{{Kind::kReasoning, "hm"}, {Kind::kContent, "Both:"}} +
           call("get_weather", kZurich, "functions.get_weather:0") +
           call("add", "{\"a\": 1}", "functions.add:1")},
      {"calls", kDeepSeek, true,
       "So</think>Hi<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>" +
           kZurich + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
       std::vector<AnswerPiece>{{Kind::kReasoning, "So"}, {Kind::kContent, "Hi"}} +
           call("get_weather", kZurich)},
      {"code blocks", kDeepSeek, false,
       "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{\"a\": "
       "2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
       "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
       call("add", "{\"a\": 2}") + call("add", "{}")},
  };
}

std::vector<Transcript> harmony_transcripts() {
  return {
      {"thought and answer",
       kHarmony,
       false,
       "<|channel|>analysis<|message|>I "
       "<think>.<|end|><|start|>assistant<|channel|>final<|message|>"
       "Hello {you}<|return|>",
       {{Kind::kReasoning, "I <think>."}, {Kind::kContent, "Hello {you}"}}},
      {"call", kHarmony, false,
       "<|channel|>analysis<|message|>Look<|end|><|start|>assistant<|channel|>commentary "
       "to=functions.get_weather <|constrain|>json<|message|>" +
           kZurich + "<|call|>",
       std::vector<AnswerPiece>{{Kind::kReasoning, "Look"}} + call("get_weather", kZurich)},
      {"recipient in front", kHarmony, false,
       " to=functions.add<|channel|>commentary json<|message|>{\"a\": 1}",
       call("add", "{\"a\": 1}")},
      {"preamble",
       kHarmony,
       false,
       "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
       "to=functions.add<|message|>{\"a\"<|call|>",
       {{Kind::kContent, "I look.{\"a\""}}},
      {"no form", kHarmony, false, "Hello", {{Kind::kContent, "Hello"}}},
  };
}

std::vector<Transcript> transcripts() {
  std::vector<Transcript> all = hermes_transcripts();
  for (auto* more :
       {&llama_and_mistral_transcripts, &kimi_and_deepseek_transcripts, &harmony_transcripts}) {
    for (Transcript& each : more()) {
      all.push_back(std::move(each));
    }
  }
  return all;
}

std::string shown(const std::vector<AnswerPiece>& pieces) {
  std::string text;
  for (const AnswerPiece& piece : pieces) {
    text += std::to_string(static_cast<int>(piece.kind)) + "[" + piece.text + "|" + piece.id + "]";
  }
  return text;
}

TEST(AnswerParser, TakesTranscriptsApartHoweverTheyAreCut) {
  for (const Transcript& each : transcripts()) {
    for (const size_t step : {0, 1, 2, 3, 5, 7, 11}) {
      EXPECT_EQ(shown(parse(each, each.text, step)), shown(each.pieces))
          << each.name << ", " << step << " bytes at a time";
    }
  }
}

/// The same for two pieces, cut at each byte.
TEST(AnswerParser, DoesNotDependOnOneCut) {
  for (const Transcript& each : transcripts()) {
    for (size_t step = 1; step < each.text.size(); ++step) {
      ASSERT_EQ(shown(parse(each, each.text, step)), shown(each.pieces)) << each.name << step;
    }
  }
}

TEST(AnswerParser, WithoutFunctionsCallsAreContent) {
  AnswerParser parser({.form = kHermes});
  parser.push_text("<think>a</think><tool_call>{\"name\": \"add\"}</tool_call>");
  parser.finish();
  EXPECT_EQ(shown(parser.take()),
            shown({{Kind::kReasoning, "a"},
                   {Kind::kContent, "<tool_call>{\"name\": \"add\"}</tool_call>"}}));
}

TEST(AnswerParser, SaysWhenItThinks) {
  AnswerParser parser({.form = kHermes, .thinks_already = true});
  EXPECT_TRUE(parser.thinks());
  parser.push_text("a</think>");
  EXPECT_FALSE(parser.thinks());
  AnswerParser harmony({.form = kHarmony});
  harmony.push_special("<|channel|>");
  harmony.push_text("analysis");
  harmony.push_special("<|message|>");
  EXPECT_TRUE(harmony.thinks());
}

/// Whatever is left out, doubled or exchanged: calls are whole, and how the text is cut does not
/// matter.
TEST(AnswerParser, NeverGivesHalfACall) {
  std::mt19937 random(7);
  const std::vector<Transcript> all = transcripts();
  int64_t calls = 0;
  for (int i = 0; i < 10000; ++i) {
    const Transcript& each = all[random() % all.size()];
    std::string text = each.text;
    for (uint32_t changes = 1 + random() % 3; changes > 0 && !text.empty(); --changes) {
      const size_t at = random() % text.size();
      const size_t count = std::min<size_t>(1 + random() % 12, text.size() - at);
      switch (random() % 4) {
        case 0:
          text.erase(at, count);
          break;
        case 1:
          text.insert(at, text.substr(random() % text.size(), count));
          break;
        case 2:
          text[at] = "{}[]\"<>|\\:, x"[random() % 13];
          break;
        default:
          text.resize(at);
      }
    }
    const auto pieces = parse(each, text, 0);
    ASSERT_EQ(shown(pieces), shown(parse(each, text, 1 + random() % 4))) << text;
    for (size_t p = 0; p < pieces.size(); ++p) {
      if (pieces[p].kind == Kind::kCallBegin) {
        ++calls;
        ASSERT_FALSE(pieces[p].text.empty());
        ASSERT_LT(p + 2, pieces.size());
        ASSERT_EQ(pieces[p + 1].kind, Kind::kArguments);
        const auto arguments = Json::parse(pieces[p + 1].text);
        ASSERT_TRUE(arguments.ok() && arguments->is_object()) << text;
        ASSERT_EQ(pieces[p + 2].kind, Kind::kCallEnd);
        p += 2;
      } else {
        ASSERT_TRUE(pieces[p].kind == Kind::kReasoning || pieces[p].kind == Kind::kContent);
      }
    }
  }
  EXPECT_GT(calls, 1000);
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.good()) << path;
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

struct TemplateCase {
  std::string_view file;
  AnswerForm form;
  std::string_view end;  // of the turn
};

/// What a template writes for a turn with a call is what its parser reads.
TEST(AnswerParser, ReadsWhatTemplatesWrite) {
  const std::array cases = {
      TemplateCase{"qwen2.5", {ReasoningForm::kNone, ToolForm::kHermes}, "<|im_end|>"},
      TemplateCase{"qwen3", kHermes, "<|im_end|>"},
      TemplateCase{"mistral-nemo", kMistral, "</s>"},
      TemplateCase{"mistral-small-3.2", kMistral, "</s>"},
      TemplateCase{"kimi-k2", kKimi, "<|im_end|>"},
      TemplateCase{"kimi-k2-instruct", kKimi, "<|im_end|>"},
      TemplateCase{"kimi-k2-thinking", kKimi, "<|im_end|>"},
      TemplateCase{"kimi-k2.5", kKimi, "<|im_end|>"},
      TemplateCase{"deepseek-v3.1", kDeepSeek, "<｜end▁of▁sentence｜>"},
      TemplateCase{"deepseek-r1-distill-qwen", kDeepSeek, "<｜end▁of▁sentence｜>"},
      TemplateCase{"gpt-oss", kHarmony, "<|call|>"},
  };
  const Json question = Json::object({{"role", "user"}, {"content", "Weather in Zürich?"}});
  const Json function =
      Json::object({{"name", "get_weather"}, {"arguments", Json::parse(kZurich).value()}});
  for (const TemplateCase& each : cases) {
    // Kimi's templates write the id alone, Mistral's refuse such ids.
    const std::string id =
        each.form.tools == ToolForm::kKimi ? "functions.get_weather:0" : "call00001";
    const Json call = Json::object({{"id", id}, {"type", "function"}, {"function", function}});
    const Json answer =
        Json::object({{"role", "assistant"}, {"content", ""}, {"tool_calls", JsonArray{call}}});
    const std::string path = "tests/data/templates/" + std::string(each.file) + ".jinja";
    const auto chat = ChatTemplate::parse(read_file(path), path);
    ASSERT_TRUE(chat.ok()) << path;
    ChatInputs inputs{.messages = JsonArray{question},
                      .generation_prompt = GenerationPrompt::kOmit,
                      .bos_token = "<s>",
                      .eos_token = std::string(each.end)};
    const auto before = chat->render(inputs);
    inputs.messages = JsonArray{question, answer};
    const auto whole = chat->render(inputs);
    ASSERT_TRUE(before.ok() && whole.ok()) << path << whole.status().message();
    // Behind what both begin with stands the turn, with its role in front.
    size_t at = 0;
    while (at < before->size() && (*before)[at] == (*whole)[at]) {
      ++at;
    }
    std::string turn = whole->substr(at);
    for (const std::string_view role :
         {"<|start|>assistant", "assistant\n", "<|im_assistant|>assistant<|im_middle|>",
          "<｜Assistant｜>", "[/INST]"}) {
      if (const size_t found = turn.find(role); found != std::string::npos) {
        turn.erase(0, found + role.size());
      }
    }
    const size_t end = turn.find(each.end);
    ASSERT_NE(end, std::string::npos) << turn;
    turn.resize(end);
    const auto pieces = parse({.name = "", .form = each.form, .text = ""}, turn, 3);
    const auto begin = std::ranges::find(pieces, Kind::kCallBegin, &AnswerPiece::kind);
    ASSERT_NE(begin, pieces.end()) << path << ": " << turn << " " << shown(pieces);
    EXPECT_EQ(begin->text, "get_weather");
    const auto arguments = Json::parse(std::next(begin)->text);
    ASSERT_TRUE(arguments.ok());
    EXPECT_EQ(arguments->dump(), Json::parse(kZurich)->dump());
    for (const AnswerPiece& piece : pieces) {
      EXPECT_NE(piece.kind, Kind::kContent) << path << ": " << shown(pieces);
    }
  }
}

TEST(AnswerForm, NamesOfOtherEngines) {
  EXPECT_EQ(find_tool_form("kimi_k2").value(), ToolForm::kKimi);
  EXPECT_EQ(find_tool_form("deepseek-v31").value(), ToolForm::kDeepSeek);
  EXPECT_EQ(find_reasoning_form("deepseek_r1").value(), ReasoningForm::kThink);
  EXPECT_EQ(tool_form_name(find_tool_form("openai").value()), "gpt-oss");
  EXPECT_NE(find_tool_form("pythonic").status().message().find("llama3-json"), std::string::npos);
}

TEST(AnswerForm, PromptsThatOpenAThought) {
  EXPECT_TRUE(ends_in_thought("<|im_start|>assistant\n<think>\n", ReasoningForm::kThink));
  EXPECT_FALSE(ends_in_thought("<think>\n\n</think>\n\n", ReasoningForm::kThink));
  EXPECT_FALSE(ends_in_thought("<think>", ReasoningForm::kNone));
}

}  // namespace
}  // namespace nibble
