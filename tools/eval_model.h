#pragma once

#include <memory>
#include <string>

#include "eval/logit_reader.h"
#include "eval/protocol.h"
#include "model_flags.h"

namespace nibble {

/// A model with all that evaluations need of it.
struct EvalModel {
  std::string name;  // last part of its path
  std::unique_ptr<Tokenizer> tokenizer;
  std::unique_ptr<Backend> backend;  // outlives the model
  std::unique_ptr<Model> model;
  KvCode kv_code = KvCode::kBf16;
  LogitLimits limits;

  /// A reader for `sequences` of up to `longest` tokens.
  Result<LogitReader> reader(int64_t longest, int64_t sequences);
};

/// Which text is scored, and how.
struct TextFlags {
  std::string file;
  std::string protocol = "ours";
  int64_t window = 0;  // 0: the protocol's
};

/// Adds --text, --protocol and --window; `flags` must outlive `command`.
void add_text_flags(CLI::App& command, TextFlags& flags);

/// A text cut into windows by one tokenizer.
struct PlannedText {
  Protocol protocol = Protocol::kOurs;
  int64_t window = 0;
  EvalText text;

  [[nodiscard]] int64_t longest_feed() const;
};

/// Reads and cuts the text. Errors name the file or the flag at fault.
Result<PlannedText> plan_text(const TextFlags& flags,
                              const std::string& model_dir,
                              const Tokenizer& tokenizer);

/// Loads the model in `flags.model_dir`.
Result<EvalModel> open_eval_model(const ModelFlags& flags);
/// The same with a tokenizer that was loaded before.
Result<EvalModel> open_eval_model(const ModelFlags& flags, std::unique_ptr<Tokenizer> tokenizer);

/// How many sequences of this length fill a step.
[[nodiscard]] int64_t sequences_of_step(int64_t longest);

}  // namespace nibble
