#include "text/chat_template.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <sstream>

#include <gtest/gtest.h>

namespace nibble {
namespace {

namespace fs = std::filesystem;

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.good()) << path;
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

Json read_json(const fs::path& path) {
  Result<Json> json = Json::parse(read_file(path));
  EXPECT_TRUE(json.ok()) << path << ": " << json.status().message();
  return json.ok() ? std::move(json).value() : Json();
}

fs::path shared_folder() {
  const char* named = std::getenv("NIBBLE_SHARED");
  return named != nullptr ? fs::path(named) : fs::path("../shared");
}

std::string text_of(const Json& object, std::string_view key) {
  const Json* member = object.find(key);
  return member != nullptr && member->is_string() ? member->as_string() : std::string();
}

std::tm parse_time(const std::string& text) {
  std::tm parts{};
  std::istringstream(text) >> std::get_time(&parts, "%Y-%m-%dT%H:%M:%S");
  return parts;
}

ChatInputs inputs_of(const Json& file, const Json& conversation) {
  ChatInputs inputs;
  const Json* messages = conversation.find("messages");
  const Json* prompt = conversation.find("add_generation_prompt");
  inputs.messages = messages != nullptr ? *messages : *file.find("messages");
  prompt = prompt != nullptr ? prompt : file.find("add_generation_prompt");
  inputs.generation_prompt = prompt->as_bool() ? GenerationPrompt::kAdd : GenerationPrompt::kOmit;
  const Json& tokens = conversation.find("bos_token") != nullptr ? conversation : file;
  inputs.bos_token = text_of(tokens, "bos_token");
  inputs.eos_token = text_of(tokens, "eos_token");
  inputs.now = parse_time(text_of(file, "now"));
  JsonObject extra;
  if (const Json* kwargs = conversation.find("kwargs"); kwargs != nullptr) {
    for (const auto& [name, value] : kwargs->as_object()) {
      if (name == "tools") {
        inputs.tools = value;
      } else {
        extra.set(name, value);
      }
    }
  }
  inputs.extra = std::move(extra);
  return inputs;
}

void expect_rendering(const ChatTemplate& chat,
                      const ChatInputs& inputs,
                      const Json& conversation) {
  const Result<std::string> text = chat.render(inputs);
  if (const Json* error = conversation.find("error"); error != nullptr) {
    ASSERT_FALSE(text.ok());
    EXPECT_EQ(text.status().code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(text.status().message(), error->as_string());
    return;
  }
  ASSERT_TRUE(text.ok()) << text.status().message();
  EXPECT_EQ(*text, text_of(conversation, "expected"));
}

// Every rendering recorded for one template of `folder`; returns how many there were.
size_t expect_recorded_renderings(const fs::path& folder, const fs::path& recorded) {
  const Json file = read_json(recorded);
  const std::string name = text_of(file, "template");
  Result<ChatTemplate> chat = ChatTemplate::parse(read_file(folder / name), name);
  EXPECT_TRUE(chat.ok()) << chat.status().message();
  if (!chat.ok()) {
    return 0;
  }
  for (const Json& conversation : file.find("cases")->as_array()) {
    SCOPED_TRACE(name + ": " + text_of(conversation, "case"));
    expect_rendering(*chat, inputs_of(file, conversation), conversation);
  }
  return file.find("cases")->as_array().size();
}

size_t expect_folder(const fs::path& folder) {
  size_t renderings = 0;
  for (const auto& entry : fs::directory_iterator(folder / "rendered")) {
    if (entry.path().filename() != "llamacpp_cases.json") {
      renderings += expect_recorded_renderings(folder, entry.path());
    }
  }
  return renderings;
}

TEST(ChatTemplate, RendersFreeTemplatesAsPython) {
  EXPECT_EQ(expect_folder("tests/data/templates"), 11 * 16);
}

TEST(ChatTemplate, RendersAllSharedTemplatesAsPython) {
  if (!fs::exists(shared_folder() / "data/templates")) {
    GTEST_SKIP() << "no shared data folder; set NIBBLE_SHARED";
  }
  EXPECT_EQ(expect_folder(shared_folder() / "data/templates"), 13 * 16);
}

TEST(ChatTemplate, RendersShortTemplatesOfOtherModels) {
  const fs::path path = shared_folder() / "data/templates/rendered/llamacpp_cases.json";
  if (!fs::exists(path)) {
    GTEST_SKIP() << "no shared data folder; set NIBBLE_SHARED";
  }
  const Json file = read_json(path);
  EXPECT_EQ(file.find("cases")->as_array().size(), 28U);
  for (const Json& conversation : file.find("cases")->as_array()) {
    const std::string name = text_of(conversation, "name");
    SCOPED_TRACE(name);
    Result<ChatTemplate> chat = ChatTemplate::parse(text_of(conversation, "template"), name);
    ASSERT_TRUE(chat.ok()) << chat.status().message();
    expect_rendering(*chat, inputs_of(file, conversation), conversation);
  }
}

TEST(ChatTemplate, RendersTheStorytellerTemplate) {
  Result<ChatTemplate> chat =
      ChatTemplate::parse(read_file("models/storyteller/chat_template.jinja"), "storyteller");
  ASSERT_TRUE(chat.ok()) << chat.status().message();
  ChatInputs inputs;
  inputs.messages = *Json::parse(R"([{"role": "user", "content": " Tell a story. "}])");
  inputs.bos_token = "<|begin_of_text|>";
  const Result<std::string> text = chat->render(inputs);
  ASSERT_TRUE(text.ok()) << text.status().message();
  EXPECT_EQ(*text,
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nTell a story.<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n");
}

// Small templates whose output, or failure, Python's Jinja2 recorded (tests/golden).
TEST(ChatTemplate, AgreesWithPythonOnEveryFeature) {
  const Json file = read_json("tests/data/templates/jinja_cases.json");
  const JsonArray& cases = file.find("cases")->as_array();
  EXPECT_GE(cases.size(), 150U);
  for (const Json& example : cases) {
    const std::string source = text_of(example, "template");
    SCOPED_TRACE(source);
    ChatInputs inputs;
    inputs.messages = *file.find("messages");
    inputs.extra = *file.find("variables");
    inputs.now = parse_time(text_of(file, "now"));
    const Result<ChatTemplate> chat = ChatTemplate::parse(source, "case");
    const Result<std::string> text =
        chat.ok() ? chat->render(inputs) : Result<std::string>(chat.status());
    if (example.find("error") != nullptr) {
      EXPECT_FALSE(text.ok()) << "rendered: " << *text;
      continue;
    }
    EXPECT_TRUE(text.ok()) << text.status().message();
    if (text.ok()) {
      EXPECT_EQ(*text, text_of(example, "expected"));
    }
  }
}

Status failure_of(const std::string& source) {
  const Result<ChatTemplate> chat = ChatTemplate::parse(source, "x.jinja");
  if (!chat.ok()) {
    return chat.status();
  }
  ChatInputs inputs;
  inputs.messages = JsonArray{};
  return chat->render(inputs).status();
}

TEST(ChatTemplate, NamesTemplateAndLineOfAFailure) {
  const Status status = failure_of("one\n{% if true %}\n{{ missing.name }}\n{% endif %}");
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "chat template x.jinja: line 3: 'missing' is undefined");
  EXPECT_EQ(failure_of("\n{% if %}").message().substr(0, 30), "chat template x.jinja: line 2:");
}

TEST(ChatTemplate, KeepsTheMessageOfARefusal) {
  EXPECT_EQ(
      failure_of("{% for i in [1] %}{{ raise_exception('line 1: no') }}{% endfor %}").message(),
      "line 1: no");
}

TEST(ChatTemplate, EndsHostileTemplates) {
  const std::string many = "{% for i in range(99999) %}";
  const std::string end = "{% endfor %}";
  const std::string hostile[] = {
      many + many + many + "x" + end + end + end,
      "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
      "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
      "{{ 'abcdefgh' * 1000000000000 }}",
      "{{ [1] * 1000000000000 }}",
      "{% set n = namespace(x='ab') %}" + many + "{% set n.x = n.x + n.x %}" + end,
      "{% set n = namespace(x=2) %}" + many + "{% set n.x = n.x * n.x %}" + end,
      "{{ range(10 ** 12) }}",
      "{{ 'x' | indent(10 ** 12, true) }}",
      "{{ 'x'.center(10 ** 12) }}",
      "{{ '%999999999999d' % 1 }}{{ 1 / 0 }}",
      "{% set l = [] %}{% set _ = l.append(l) %}{{ l }}",
      "{% set l = [] %}{% set _ = l.append(l) %}{{ l | tojson }}",
      "{% set a = [] %}{% set b = [] %}{% set _ = a.append(b) %}{% set _ = b.append(a) %}{{ a == b "
      "}}",
      many + "{{ ('a' * 100000).replace('', 'bbbbbbbb') }}" + end,
      "{{ " + std::string(100000, '(') + "1 }}",
      "{{ " + std::string(100000, '-') + "1 }}",
      "{{ " + std::string(100000, '[') + " }}",
      "{{ not" + std::string(100000, ' ') + "x" + std::string(5000, '.') + " }}",
  };
  for (const std::string& source : hostile) {
    SCOPED_TRACE(source.substr(0, 100));
    const Status status = failure_of(source);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_FALSE(status.message().empty());
  }
  std::string chain = "{{ 1";
  std::string nested;
  for (int i = 0; i < 5000; ++i) {
    chain += "+1";
    nested += "{% if true %}";
  }
  EXPECT_EQ(failure_of(chain + " }}").code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(failure_of(nested).code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace nibble
