#include "eval/task_reader.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "base/file.h"
#include "base/json_lines.h"

namespace nibble {
namespace {

using Strings = std::vector<std::string>;

int64_t characters_of(std::string_view text) {
  return std::ranges::count_if(text, [](char c) { return (c & 0xc0) != 0x80; });
}

// A blank stands between context and choice, as in lm-eval.
Choice choice_of(std::string context, const std::string& text) {
  return {.context = std::move(context),
          .continuation = " " + text,
          .characters = characters_of(text),
          .bytes = std::ssize(text)};
}

Status bad(std::string_view key, std::string_view what) {
  return make_error(StatusCode::kCorrupt, "field {}: {}", key, what);
}

/// The fields of one line.
class Fields final {
 public:
  explicit Fields(const Json& json) : json_(json), reader_(json, "the item") {}

  [[nodiscard]] bool has(std::string_view key) const { return json_.find(key) != nullptr; }
  [[nodiscard]] Result<std::string> text(std::string_view key) const {
    return reader_.required_string(key);
  }
  [[nodiscard]] Result<Strings> texts(std::string_view key) const {
    const Json* found = json_.find(key);
    if (found == nullptr || !found->is_array()) {
      return bad(key, found == nullptr ? "missing" : "expected a list of strings");
    }
    Strings out;
    for (const Json& one : found->as_array()) {
      if (!one.is_string()) {
        return bad(key, "expected a list of strings");
      }
      out.push_back(one.as_string());
    }
    return out;
  }
  // An index: a number, or a number in a string as some files of the Hub have it.
  [[nodiscard]] Result<int64_t> index(std::string_view key, size_t choices) const {
    const Json* found = json_.find(key);
    if (found == nullptr) {
      return bad(key, "missing");
    }
    std::optional<int64_t> value;
    if (found->is_int()) {
      value = found->as_int();
    } else if (found->is_string() && found->as_string().size() == 1 &&
               found->as_string()[0] >= '0' && found->as_string()[0] <= '9') {
      value = found->as_string()[0] - '0';
    } else if (found->is_bool()) {
      value = found->as_bool() ? 1 : 0;
    }
    if (!value) {
      return bad(key, fmt::format("expected a whole number, got {}", json_type_name(*found)));
    }
    if (*value < 0 || *value >= static_cast<int64_t>(choices)) {
      return bad(key, fmt::format("{} is out of range; there are {} choices, counted from 0",
                                  *value, choices));
    }
    return *value;
  }
  [[nodiscard]] const Json& json() const { return json_; }

 private:
  const Json& json_;
  JsonReader reader_;
};

Result<TaskItem> item_of(const std::string& context, const Strings& choices, int64_t gold) {
  TaskItem item{.gold = gold};
  for (const std::string& choice : choices) {
    item.choices.push_back(choice_of(context, choice));
  }
  return item;
}

// {query, choices, gold}; `suffix` follows the query.
Result<TaskItem> from_query(const Fields& fields, std::string_view suffix) {
  NIBBLE_ASSIGN_OR_RETURN(const std::string query, fields.text("query"));
  NIBBLE_ASSIGN_OR_RETURN(const Strings choices, fields.texts("choices"));
  NIBBLE_ASSIGN_OR_RETURN(const int64_t gold, fields.index("gold", choices.size()));
  return item_of(query + std::string(suffix), choices, gold);
}

// {context, continuation}: one choice.
Result<TaskItem> from_continuation(const Fields& fields) {
  NIBBLE_ASSIGN_OR_RETURN(const std::string context, fields.text("context"));
  NIBBLE_ASSIGN_OR_RETURN(const std::string continuation, fields.text("continuation"));
  return item_of(context, {continuation}, 0);
}

// {context_options, continuation, gold}: the same end after each of several contexts.
Result<TaskItem> from_options(const Fields& fields) {
  NIBBLE_ASSIGN_OR_RETURN(const Strings options, fields.texts("context_options"));
  NIBBLE_ASSIGN_OR_RETURN(const std::string continuation, fields.text("continuation"));
  TaskItem item;
  NIBBLE_ASSIGN_OR_RETURN(item.gold, fields.index("gold", options.size()));
  for (const std::string& option : options) {
    item.choices.push_back(choice_of(option, continuation));
  }
  return item;
}

Result<TaskItem> any_shape(const Fields& fields) {
  if (fields.has("context_options")) {
    return from_options(fields);
  }
  return fields.has("context") ? from_continuation(fields) : from_query(fields, "");
}

Result<TaskItem> piqa(const Fields& fields) {
  if (!fields.has("goal")) {
    return from_query(fields, "Answer:");  // the query ends in a newline
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string goal, fields.text("goal"));
  NIBBLE_ASSIGN_OR_RETURN(const std::string first, fields.text("sol1"));
  NIBBLE_ASSIGN_OR_RETURN(const std::string second, fields.text("sol2"));
  NIBBLE_ASSIGN_OR_RETURN(const int64_t gold, fields.index("label", 2));
  return item_of("Question: " + goal + "\nAnswer:", {first, second}, gold);
}

Result<TaskItem> arc(const Fields& fields) {
  if (!fields.has("question")) {
    return from_query(fields, "\nAnswer:");
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string question, fields.text("question"));
  NIBBLE_ASSIGN_OR_RETURN(const std::string key, fields.text("answerKey"));
  const Json* choices = fields.json().find("choices");
  if (choices == nullptr || !choices->is_object()) {
    return bad("choices", "expected an object with text and label");
  }
  const Fields inner(*choices);
  NIBBLE_ASSIGN_OR_RETURN(const Strings texts, inner.texts("text"));
  NIBBLE_ASSIGN_OR_RETURN(const Strings labels, inner.texts("label"));
  const auto at = std::ranges::find(labels, key) - labels.begin();
  if (at >= std::ssize(labels) || labels.size() != texts.size()) {
    return bad("answerKey", fmt::format("'{}' is none of the {} labels", key, labels.size()));
  }
  return item_of("Question: " + question + "\nAnswer:", texts, at);
}

std::string without_brackets(std::string text) {
  for (size_t begin = text.find('['); begin != std::string::npos; begin = text.find('[', begin)) {
    const size_t end = text.find_first_of("]\n", begin);
    if (end == std::string::npos || text[end] == '\n') {
      begin += 1;
    } else {
      text.erase(begin, end + 1 - begin);
    }
  }
  return text;
}

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
}

// As lm-eval cleans HellaSwag of the marks of WikiHow.
std::string clean_hellaswag(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t\r\n");
  const size_t end = text.find_last_not_of(" \t\r\n");
  std::string out(begin == std::string_view::npos ? "" : text.substr(begin, end + 1 - begin));
  replace_all(out, " [title]", ". ");
  out = without_brackets(std::move(out));
  replace_all(out, "  ", " ");
  return out;
}

// Python's str.capitalize(), of ASCII letters.
std::string capitalized(std::string text) {
  const auto is = [](char c, char first) { return c >= first && c < first + 26; };
  for (size_t i = 0; i < text.size(); ++i) {
    text[i] = static_cast<char>(i == 0 && is(text[i], 'a')  ? text[i] - 32
                                : i > 0 && is(text[i], 'A') ? text[i] + 32
                                                            : text[i]);
  }
  return text;
}

Result<TaskItem> hellaswag(const Fields& fields) {
  if (!fields.has("endings")) {
    return from_query(fields, "");
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string label, fields.text("activity_label"));
  NIBBLE_ASSIGN_OR_RETURN(const std::string first, fields.text("ctx_a"));
  NIBBLE_ASSIGN_OR_RETURN(const std::string second, fields.text("ctx_b"));
  NIBBLE_ASSIGN_OR_RETURN(Strings endings, fields.texts("endings"));
  NIBBLE_ASSIGN_OR_RETURN(const int64_t gold, fields.index("label", endings.size()));
  std::ranges::transform(endings, endings.begin(), clean_hellaswag);
  return item_of(clean_hellaswag(label + ": " + first + " " + capitalized(second)), endings, gold);
}

Result<TaskItem> winogrande(const Fields& fields) {
  if (!fields.has("sentence")) {
    return from_options(fields);
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string sentence, fields.text("sentence"));
  NIBBLE_ASSIGN_OR_RETURN(const std::string first, fields.text("option1"));
  NIBBLE_ASSIGN_OR_RETURN(const std::string second, fields.text("option2"));
  NIBBLE_ASSIGN_OR_RETURN(const std::string answer, fields.text("answer"));
  const size_t gap = sentence.find('_');
  if (gap == std::string::npos || (answer != "1" && answer != "2")) {
    return bad(gap == std::string::npos ? "sentence" : "answer",
               gap == std::string::npos ? "has no gap '_'" : "must be \"1\" or \"2\"");
  }
  std::string rest = sentence.substr(gap + 1);
  rest.erase(0, std::min(rest.find_first_not_of(' '), rest.size()));
  TaskItem item{.gold = answer == "2" ? 1 : 0};
  for (const std::string& option : {first, second}) {
    item.choices.push_back(choice_of(sentence.substr(0, gap) + option, rest));
  }
  return item;
}

Result<TaskItem> boolq(const Fields& fields) {
  if (fields.has("passage")) {
    NIBBLE_ASSIGN_OR_RETURN(const std::string passage, fields.text("passage"));
    NIBBLE_ASSIGN_OR_RETURN(const std::string question, fields.text("question"));
    const std::string_view key = fields.has("label") ? "label" : "answer";
    NIBBLE_ASSIGN_OR_RETURN(const int64_t gold, fields.index(key, 2));
    return item_of(passage + "\nQuestion: " + question + "?\nAnswer:", {"no", "yes"}, gold);
  }
  NIBBLE_ASSIGN_OR_RETURN(TaskItem item, from_query(fields, "\nAnswer:"));
  constexpr std::string_view kTitle = "Passage: ";  // lm-eval has none
  for (Choice& choice : item.choices) {
    if (choice.context.starts_with(kTitle)) {
      choice.context.erase(0, kTitle.size());
    }
  }
  return item;
}

Result<TaskItem> lambada(const Fields& fields) {
  if (!fields.has("text")) {
    return from_continuation(fields);
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, fields.text("text"));
  const size_t blank = text.rfind(' ');
  if (blank == std::string::npos) {
    return bad("text", "has no blank in front of its last word");
  }
  return item_of(text.substr(0, blank), {text.substr(blank + 1)}, 0);
}

using Read = Result<TaskItem> (*)(const Fields&);
constexpr std::array<std::pair<std::string_view, Read>, 7> kTasks = {{
    {"piqa", piqa},
    {"arc_easy", arc},
    {"arc_challenge", arc},
    {"hellaswag", hellaswag},
    {"winogrande", winogrande},
    {"boolq", boolq},
    {"lambada_openai", lambada},
}};

Result<TaskItem> parse(const std::string& name, const Json& json) {
  const auto* known =
      std::ranges::find(kTasks, std::string_view(name), &std::pair<std::string_view, Read>::first);
  const Fields fields(json);
  NIBBLE_ASSIGN_OR_RETURN(TaskItem item,
                          known == kTasks.end() ? any_shape(fields) : known->second(fields));
  for (const Choice& choice : item.choices) {
    if (choice.bytes == 0 || choice.context.empty()) {
      return make_error(StatusCode::kCorrupt, "{} is empty",
                        choice.bytes == 0 ? "a choice" : "the context");
    }
  }
  return item;
}

}  // namespace

std::vector<std::string> known_tasks() {
  std::vector<std::string> names(kTasks.size());
  std::ranges::transform(kTasks, names.begin(),
                         [](const auto& entry) { return std::string(entry.first); });
  return names;
}

Result<TaskItem> parse_task_item(const std::string& name, std::string_view line) {
  NIBBLE_ASSIGN_OR_RETURN(const Json json, Json::parse(line));
  return parse(name, json);
}

Result<Task> read_task(const std::string& name, const std::string& path, int64_t limit) {
  Task task{.name = name};
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_file(path));
  const JsonLines lines{.text = text, .where = path, .limit = limit};
  NIBBLE_RETURN_IF_ERROR(for_each_json_line(lines, [&](const Json& json) -> Status {
    NIBBLE_ASSIGN_OR_RETURN(TaskItem item, parse(name, json));
    task.items.push_back(std::move(item));
    return {};
  }));
  if (task.items.empty()) {
    return make_error(StatusCode::kInvalidArgument, "{}: has no items", path);
  }
  return task;
}

}  // namespace nibble
