#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>

#include <fmt/format.h>

#include "base/file.h"
#include "base/json.h"
#include "command.h"
#include "eval/task_reader.h"
#include "eval/task_result.h"
#include "eval_model.h"
#include "flag_checks.h"
#include "output.h"
#include "progress.h"

namespace nibble {

void add_eval_tasks_command(CLI::App& eval, CommandContext& context);

namespace {

struct TasksFlags {
  ModelFlags model;
  std::vector<std::string> models;
  std::vector<std::string> tasks;  // NAME, FILE.jsonl or NAME=FILE
  std::string data_dir = ".";
  int64_t limit = 0;
  std::string samples;
  bool json = false;
};

/// What one model made of the tasks.
struct ModelAnswers {
  std::string model;
  std::string kv_cache_dtype;
  double seconds = 0;
  std::vector<TaskAnswers> tasks;
};

/// A way to count right answers.
struct Metric {
  const char* name;
  std::vector<double> TaskAnswers::*values;
};
constexpr Metric kMetrics[] = {{"acc", &TaskAnswers::acc},
                               {"acc_norm", &TaskAnswers::acc_norm},
                               {"acc_bytes", &TaskAnswers::acc_bytes}};

// Of single choices only whether they were right.
std::span<const Metric> metrics_of(const Task& task) {
  const bool single = std::ranges::all_of(
      task.items, [](const TaskItem& item) { return item.choices.size() == 1; });
  return std::span(kMetrics).first(single ? 1 : 3);
}

Result<std::vector<Task>> read_tasks(const TasksFlags& flags) {
  std::vector<Task> tasks;
  const std::vector<std::string> known = known_tasks();
  for (const std::string& asked : flags.tasks) {
    const size_t equals = asked.find('=');
    std::string name = asked.substr(0, equals);
    std::string path = equals == std::string::npos ? asked : asked.substr(equals + 1);
    const bool is_known = std::ranges::find(known, name) != known.end();
    if (is_known && equals == std::string::npos) {
      path = flags.data_dir + "/" + name + ".jsonl";
    } else if (!is_known && (equals != std::string::npos || !asked.ends_with(".jsonl"))) {
      return make_error(StatusCode::kInvalidArgument,
                        "--tasks {}: neither a file that ends in .jsonl nor one of {}", asked,
                        fmt::join(known, ", "));
    }
    if (is_known && !file_exists(path)) {
      return make_error(StatusCode::kNotFound,
                        "{}: no such file; --data-dir names the folder with the tasks' files",
                        path);
    }
    name = is_known ? name : std::string(file_name(name));
    NIBBLE_ASSIGN_OR_RETURN(Task task, read_task(name, path, flags.limit));
    tasks.push_back(std::move(task));
  }
  return tasks;
}

/// A task's items in tokens, and the longest of them.
struct EncodedTask {
  std::vector<std::vector<ChoiceTokens>> items;
  int64_t longest = 0;
};

Result<EncodedTask> encode_task(const Task& task, const Tokenizer& tokenizer, int64_t context) {
  EncodedTask out;
  for (size_t i = 0; i < task.items.size(); ++i) {
    std::vector<ChoiceTokens>& choices = out.items.emplace_back();
    for (const Choice& choice : task.items[i].choices) {
      auto tokens = encode_choice(tokenizer, choice, context);
      if (!tokens.ok()) {
        return tokens.status().with_context(fmt::format("{}: item {}", task.name, i + 1));
      }
      out.longest = std::max(out.longest, std::ssize(tokens->tokens) - 1);
      choices.push_back(std::move(tokens).value());
    }
  }
  return out;
}

// Sequences that are worked on together: enough for full steps of one continuation each.
int64_t sequences_for(const LogitLimits& limits, int64_t longest) {
  constexpr int64_t kMostTokens = 32768;  // of all sequences: bounds the cache
  return std::clamp<int64_t>(kMostTokens / std::max<int64_t>(longest, 1), 1,
                             std::min<int64_t>(limits.rows, 64));
}

std::string sample_lines(const std::string& model,
                         const Task& task,
                         const std::vector<std::vector<ChoiceScore>>& scores) {
  std::string out;
  for (size_t i = 0; i < scores.size(); ++i) {
    JsonArray sums;
    JsonArray greedy;
    for (const ChoiceScore& score : scores[i]) {
      sums.emplace_back(score.log_likelihood);
      greedy.emplace_back(score.greedy);
    }
    out += Json::object({{"model", model},
                         {"task", task.name},
                         {"item", static_cast<int64_t>(i)},
                         {"log_likelihoods", std::move(sums)},
                         {"greedy", std::move(greedy)},
                         {"gold", task.items[i].gold}})
               .dump() +
           "\n";
  }
  return out;
}

class TasksCommand final {
 public:
  explicit TasksCommand(const TasksFlags& flags) : pool_(flags.model.threads), flags_(flags) {}

  Status run() {
    NIBBLE_ASSIGN_OR_RETURN(tasks_, read_tasks(flags_));
    for (const std::string& dir : flags_.models) {
      NIBBLE_RETURN_IF_ERROR(ask(dir));
    }
    if (!flags_.samples.empty()) {
      NIBBLE_RETURN_IF_ERROR(write_text_file(flags_.samples, samples_));
    }
    print_out(flags_.json ? json().dump() + "\n" : text());
    return {};
  }

 private:
  Status ask(const std::string& dir) {
    const auto start = std::chrono::steady_clock::now();
    ModelFlags one = flags_.model;
    one.model_dir = dir;
    NIBBLE_ASSIGN_OR_RETURN(EvalModel model, open_eval_model(one));
    ModelAnswers answers{.model = dir, .kv_cache_dtype = std::string(kv_code_name(model.kv_code))};
    for (const Task& task : tasks_) {
      NIBBLE_ASSIGN_OR_RETURN(TaskAnswers some, ask(model, dir, task));
      answers.tasks.push_back(std::move(some));
    }
    const auto seconds = std::chrono::steady_clock::now() - start;
    answers.seconds = std::chrono::duration<double>(seconds).count();
    answers_.push_back(std::move(answers));
    return {};
  }

  Result<TaskAnswers> ask(EvalModel& model, const std::string& dir, const Task& task) {
    NIBBLE_ASSIGN_OR_RETURN(
        const EncodedTask encoded,
        encode_task(task, *model.tokenizer, model.model->config().max_position));
    NIBBLE_ASSIGN_OR_RETURN(
        LogitReader reader,
        model.reader(encoded.longest, sequences_for(model.limits, encoded.longest)));
    ProgressDisplay display("answered", ProgressDisplay::Unit::kItems);
    const ScoringRun options{.pool = pool_, .progress = [&](int64_t done) {
                               display.update(done, std::ssize(task.items), task.name);
                             }};
    NIBBLE_ASSIGN_OR_RETURN(const auto scores, score_choices(reader, encoded.items, options));
    if (!flags_.samples.empty()) {
      samples_ += sample_lines(dir, task, scores);
    }
    return answers_of(task, scores);
  }

  [[nodiscard]] Json task_json(size_t task, const TaskAnswers& answers) const {
    Json json =
        Json::object({{"task", tasks_[task].name}, {"items", std::ssize(tasks_[task].items)}});
    for (const Metric& metric : metrics_of(tasks_[task])) {
      const Estimate estimate = estimate_of(answers.*metric.values);
      json.set(metric.name, estimate.mean);
      json.set(std::string(metric.name) + "_error", estimate.error);
    }
    const Estimate nll = estimate_of(answers.nll);
    json.set("gold_nll", nll.mean);
    json.set("gold_nll_error", nll.error);
    json.set("gold_perplexity", std::exp(nll.mean));
    return json;
  }

  [[nodiscard]] Json difference_json(size_t task, const ModelAnswers& model) const {
    Json json = Json::object(
        {{"task", tasks_[task].name}, {"model", model.model}, {"base", answers_.front().model}});
    for (const Metric& metric : metrics_of(tasks_[task])) {
      const Estimate estimate = paired_difference(model.tasks[task].*metric.values,
                                                  answers_.front().tasks[task].*metric.values);
      json.set(metric.name, estimate.mean);
      json.set(std::string(metric.name) + "_error", estimate.error);
    }
    return json;
  }

  [[nodiscard]] Json json() const {
    JsonArray models;
    JsonArray differences;
    for (const ModelAnswers& model : answers_) {
      JsonArray tasks;
      for (size_t task = 0; task < tasks_.size(); ++task) {
        tasks.push_back(task_json(task, model.tasks[task]));
        if (&model != &answers_.front()) {
          differences.push_back(difference_json(task, model));
        }
      }
      models.push_back(Json::object({{"model", model.model},
                                     {"kv_cache_dtype", model.kv_cache_dtype},
                                     {"seconds", model.seconds},
                                     {"tasks", std::move(tasks)}}));
    }
    return Json::object({{"models", std::move(models)}, {"differences", std::move(differences)}});
  }

  [[nodiscard]] std::string text() const {
    std::string out;
    for (size_t task = 0; task < tasks_.size(); ++task) {
      for (const ModelAnswers& model : answers_) {
        out += fmt::format("{} ({} items), {}:", tasks_[task].name, tasks_[task].items.size(),
                           model.model);
        for (const Metric& metric : metrics_of(tasks_[task])) {
          const Estimate e = estimate_of(model.tasks[task].*metric.values);
          out += fmt::format(" {} {:.2f} +- {:.2f} %", metric.name, 100 * e.mean, 100 * e.error);
          if (&model != &answers_.front()) {
            const Estimate d = paired_difference(model.tasks[task].*metric.values,
                                                 answers_.front().tasks[task].*metric.values);
            out += fmt::format(" ({:+.2f} +- {:.2f})", 100 * d.mean, 100 * d.error);
          }
        }
        out += "\n";
      }
    }
    return out;
  }

  ThreadPool pool_;  // first: its lines of cache leave no padding then
  const TasksFlags& flags_;
  std::vector<Task> tasks_;
  std::vector<ModelAnswers> answers_;
  std::string samples_;
};

}  // namespace

void add_eval_tasks_command(CLI::App& eval, CommandContext& context) {
  auto flags = std::make_shared<TasksFlags>();
  CLI::App* tasks = eval.add_subcommand("tasks", "Questions with choices, by log-likelihood");
  tasks
      ->add_option("MODEL", flags->models,
                   "Model folders in Hugging Face format; later ones are compared with the first")
      ->required();
  add_run_flags(*tasks, flags->model);
  tasks
      ->add_option("--tasks", flags->tasks,
                   fmt::format("{}, NAME=FILE, or FILE.jsonl with query, choices, gold (several: "
                               "with commas)",
                               fmt::join(known_tasks(), ", ")))
      ->required()
      ->delimiter(',')
      ->allow_extra_args(false);
  tasks->add_option("--data-dir", flags->data_dir, "Folder with NAME.jsonl of the named tasks")
      ->capture_default_str();
  tasks->add_option("--limit", flags->limit, "Items of each task; 0: all")
      ->check(whole_number(0))
      ->capture_default_str();
  tasks->add_option("--samples", flags->samples,
                    "Write the log-likelihoods of every item's choices to this JSONL file");
  tasks->add_flag("--json", flags->json, "Print one JSON object: models, differences");
  tasks->callback(
      [flags, &context] { context.action = [flags] { return TasksCommand(*flags).run(); }; });
}

}  // namespace nibble
