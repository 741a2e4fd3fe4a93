#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "eval/task_item.h"

namespace nibble {

/// Tasks whose prompts are those of lm-eval: piqa, arc_easy, arc_challenge, hellaswag, winogrande,
/// boolq, lambada_openai.
[[nodiscard]] std::vector<std::string> known_tasks();

/// Reads a task from a JSONL file, one item a line; empty lines are passed over. `name` may be a
/// known task, else lines are taken as they are. docs/evaluation.md lists the keys.
///   limit: most items; 0: all
/// kCorrupt naming the line: no JSON object, a field missing or of another type, gold out of range,
/// an empty choice. kInvalidArgument: no items.
Result<Task> read_task(const std::string& name, const std::string& path, int64_t limit);

/// One line of a task. kCorrupt without the line's number.
Result<TaskItem> parse_task_item(const std::string& name, std::string_view line);

}  // namespace nibble
