#include "calibration/calibration_text.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <string_view>

#include "base/file.h"
#include "base/json_lines.h"
#include "base/utf8.h"
#include "quantizer/digest.h"

namespace nibble {
namespace {

constexpr int64_t kUsualLength = 512;
constexpr int64_t kLeastShare = 4;  // of a matrix's columns: fewer tokens say nothing

/// The texts of all lines, with an empty line between.
Result<std::string> joined_lines(std::string_view content, const std::string& path) {
  std::string joined;
  NIBBLE_RETURN_IF_ERROR(
      for_each_json_line({.text = content, .where = path}, [&](const Json& json) -> Status {
        const Json* text = json.find("text");
        if (text == nullptr || !text->is_string()) {
          return make_error(StatusCode::kInvalidArgument,
                            "no field \"text\" with a string; each line must have one");
        }
        joined += joined.empty() ? "" : "\n\n";
        joined += text->as_string();
        return {};
      }));
  return joined;
}

/// `wanted` of `count` windows, ascending; the same for a seed on every machine.
std::vector<int64_t> choose_windows(int64_t count, int64_t wanted, uint64_t seed) {
  std::vector<int64_t> chosen(static_cast<size_t>(count));
  std::iota(chosen.begin(), chosen.end(), 0);
  if (count > wanted) {
    std::mt19937_64 random(seed);
    for (int64_t i = 0; i < wanted; ++i) {
      const auto other = i + static_cast<int64_t>(random() % static_cast<uint64_t>(count - i));
      std::swap(chosen[static_cast<size_t>(i)], chosen[static_cast<size_t>(other)]);
    }
    chosen.resize(static_cast<size_t>(wanted));
    std::sort(chosen.begin(), chosen.end());
  }
  return chosen;
}

}  // namespace

Result<CalibrationText> read_calibration_text(const CalibrationTextOptions& options,
                                              const Tokenizer& tokenizer) {
  NIBBLE_ASSIGN_OR_RETURN(std::string content, read_file(options.path));
  CalibrationText result;
  result.digest = digest_text(digest_of(content));
  if (content.find('\0') != std::string::npos) {
    return make_error(StatusCode::kInvalidArgument,
                      "{}: holds zero bytes, so it is no text; unpack it, or give another file",
                      options.path);
  }
  if (!is_utf8(content)) {
    return make_error(StatusCode::kInvalidArgument,
                      "{}: is not UTF-8, so it is no text that the tokenizer knows; convert it, or "
                      "give another file",
                      options.path);
  }
  if (options.path.ends_with(".jsonl")) {
    NIBBLE_ASSIGN_OR_RETURN(content, joined_lines(content, options.path));
  }
  const auto tokens = tokenizer.encode(content, SpecialTokens::kPlain);
  NIBBLE_RETURN_IF_ERROR(tokens.status().with_context(options.path));
  const auto total = std::ssize(*tokens);
  if (total == 0) {
    return make_error(StatusCode::kInvalidArgument,
                      "{}: is empty; give a text like those that "
                      "the model is for",
                      options.path);
  }
  const int64_t length = std::min(options.length, total);
  for (const int64_t window : choose_windows(total / length, options.windows, options.seed)) {
    const auto begin = tokens->begin() + window * length;
    result.windows.emplace_back(begin, begin + length);
  }
  return result;
}

Result<CalibrationText> read_model_text(const std::string& model,
                                        const ModelConfig& config,
                                        CalibrationTextOptions options) {
  if (options.length == 0) {
    options.length = std::min(kUsualLength, config.max_position);
  }
  if (options.windows < 1 || options.length < 2 || options.length > config.max_position) {
    return make_error(StatusCode::kInvalidArgument,
                      "--calibration-windows {} and --calibration-length {}: at least one window "
                      "of 2 to {} tokens is needed, the model's context",
                      options.windows, options.length, config.max_position);
  }
  NIBBLE_ASSIGN_OR_RETURN(const auto tokenizer, Tokenizer::load(model));
  NIBBLE_ASSIGN_OR_RETURN(CalibrationText text, read_calibration_text(options, *tokenizer));
  for (const std::vector<int32_t>& window : text.windows) {
    for (const int32_t token : window) {
      if (token < 0 || token >= config.vocab_size) {
        return make_error(StatusCode::kInvalidArgument,
                          "{}: has token id {}, but the model's vocabulary has {} tokens; the "
                          "tokenizer belongs to another model",
                          options.path, token, config.vocab_size);
      }
    }
  }
  return text;
}

Status check_tokens(const CalibrationText& text, const std::string& path, int64_t columns) {
  const int64_t least = columns / kLeastShare;
  return text.tokens() >= least
             ? Status()
             : make_error(StatusCode::kInvalidArgument,
                          "{}: {} tokens in windows of {} say too little about matrices of {} "
                          "columns; at least {} are needed, and {} are better: give a longer text, "
                          "--calibration-windows or --calibration-length",
                          path, text.tokens(), text.windows.front().size(), columns, least,
                          tokens_wanted(columns));
}

int64_t tokens_wanted(int64_t columns) { return kLeastShare * columns; }

}  // namespace nibble
