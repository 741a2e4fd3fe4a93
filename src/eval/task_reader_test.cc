#include "eval/task_reader.h"

#include <filesystem>
#include <fstream>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

namespace nibble {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// "context|continuation" of each choice, and "*" behind the right one.
std::vector<std::string> choices_of(const std::string& name, std::string_view line) {
  const auto item = parse_task_item(name, line);
  EXPECT_TRUE(item.ok()) << item.status().message();
  std::vector<std::string> out;
  for (const Choice& choice : item->choices) {
    out.push_back(choice.context + "|" + choice.continuation);
  }
  out.at(static_cast<size_t>(item->gold)) += "*";
  return out;
}

std::string file_of(const std::string& text) {
  std::string path = (std::filesystem::path(::testing::TempDir()) /
                      ("task_reader_test" + std::to_string(::getpid()) + ".jsonl"))
                         .string();
  std::ofstream(path, std::ios::binary) << text;
  return path;
}

TEST(TaskReader, OwnFilesAreTakenAsTheyAre) {
  EXPECT_THAT(choices_of("x.jsonl", R"({"query": "Q:", "choices": ["a", "b"], "gold": 1})"),
              ElementsAre("Q:| a", "Q:| b*"));
  EXPECT_THAT(choices_of("x.jsonl", R"({"context": "so it", "continuation": "ends"})"),
              ElementsAre("so it| ends*"));
  EXPECT_THAT(
      choices_of("x.jsonl", R"({"context_options": ["A", "B"], "continuation": "c", "gold": 0})"),
      ElementsAre("A| c*", "B| c"));
}

TEST(TaskReader, LengthsAreThoseOfTheChoiceAlone) {
  const auto item =
      parse_task_item("x", "{\"query\": \"q\", \"choices\": [\"na\u00efve\", \"b\"], \"gold\": 0}");
  EXPECT_EQ(item->choices[0].characters, 5);
  EXPECT_EQ(item->choices[0].bytes, 6);
}

TEST(TaskReader, PromptsAreThoseOfLmEval) {
  EXPECT_THAT(choices_of("piqa", R"({"goal": "g", "sol1": "s", "sol2": "t", "label": 1})"),
              ElementsAre("Question: g\nAnswer:| s", "Question: g\nAnswer:| t*"));
  EXPECT_THAT(choices_of("piqa", R"({"query": "Question: g\n", "choices": ["s", "t"], "gold": 0})"),
              ElementsAre("Question: g\nAnswer:| s*", "Question: g\nAnswer:| t"));
  EXPECT_THAT(choices_of("arc_easy",
                         R"({"question": "q", "answerKey": "B",
                             "choices": {"text": ["s", "t"], "label": ["A", "B"]}})"),
              ElementsAre("Question: q\nAnswer:| s", "Question: q\nAnswer:| t*"));
  EXPECT_THAT(
      choices_of("arc_challenge", R"({"query": "Question: q", "choices": ["s", "t"], "gold": 0})"),
      ElementsAre("Question: q\nAnswer:| s*", "Question: q\nAnswer:| t"));
  EXPECT_THAT(choices_of("winogrande",
                         R"({"sentence": "As _ was late.", "option1": "he", "option2": "it",
                             "answer": "2"})"),
              ElementsAre("As he| was late.", "As it| was late.*"));
  EXPECT_THAT(
      choices_of("boolq", R"({"passage": "P.", "question": "is it", "label": 1})"),
      ElementsAre("P.\nQuestion: is it?\nAnswer:| no", "P.\nQuestion: is it?\nAnswer:| yes*"));
  EXPECT_THAT(
      choices_of("boolq", R"({"query": "Passage: P.\nQuestion: is it?",
                                      "choices": ["no", "yes"], "gold": 0})"),
      ElementsAre("P.\nQuestion: is it?\nAnswer:| no*", "P.\nQuestion: is it?\nAnswer:| yes"));
  EXPECT_THAT(choices_of("lambada_openai", R"({"text": "and so it ends"})"),
              ElementsAre("and so it| ends*"));
}

// Expected texts made by preprocess() and capitalize() of lm-eval's tasks/hellaswag/utils.py.
TEST(TaskReader, HellaSwagIsCleanedAsInLmEval) {
  EXPECT_THAT(choices_of("hellaswag",
                         R"({"activity_label": "Baking", "ctx_a": "A man [header] Mix [title] it.",
                             "ctx_b": "the Man", "endings": [" stirs  it [step]. ", "runs"],
                             "label": "1"})"),
              ElementsAre("Baking: A man Mix. it. The man| stirs it .",
                          "Baking: A man Mix. it. The man| runs*"));
}

TEST(TaskReader, LinesAtFaultAreNamed) {
  const std::string good = R"({"query": "q", "choices": ["a", "b"], "gold": 1})";
  const auto failure = [&](const std::string& line) {
    const Status status = read_task("x.jsonl", file_of(good + "\n\n" + line + "\n"), 0).status();
    EXPECT_EQ(status.code(), StatusCode::kCorrupt) << line;
    EXPECT_THAT(status.message(), HasSubstr("line 3")) << line;
    return status.message();
  };
  EXPECT_THAT(failure(R"({"query": "q", "choices": ["a", "b"]})"), HasSubstr("gold"));
  EXPECT_THAT(failure(R"({"query": "q", "choices": ["a", "b"], "gold": 2})"),
              AllOf(HasSubstr("gold"), HasSubstr("2 is out of range"), HasSubstr("2 choices")));
  EXPECT_THAT(failure(R"({"query": "q", "choices": ["a", "b"], "gold": -1})"), HasSubstr("-1"));
  EXPECT_THAT(failure(R"({"query": "q", "choices": ["a", "b"], "gold": 0.5})"), HasSubstr("gold"));
  EXPECT_THAT(failure(R"({"query": "q", "choices": "a", "gold": 0})"), HasSubstr("choices"));
  EXPECT_THAT(failure(R"({"query": "q", "choices": ["a", ""], "gold": 0})"), HasSubstr("empty"));
  EXPECT_THAT(failure(R"({"choices": ["a", "b"], "gold": 0})"), HasSubstr("query"));
  EXPECT_THAT(failure(R"({"query": 5, "choices": ["a", "b"], "gold": 0})"), HasSubstr("query"));
  EXPECT_THAT(failure("[1]"), HasSubstr("an array"));
  EXPECT_THAT(failure(R"({"query": )"), HasSubstr("line 3"));
}

TEST(TaskReader, LimitAndEmptyFiles) {
  const std::string good = R"({"query": "q", "choices": ["a", "b"], "gold": 1})";
  EXPECT_EQ(read_task("x", file_of(good + "\n" + good + "\n{\n"), 2)->items.size(), 2U);
  EXPECT_EQ(read_task("x", file_of("\n \n"), 0).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(read_task("x", "no_such_file.jsonl", 0).status().code(), StatusCode::kNotFound);
}

}  // namespace
}  // namespace nibble
