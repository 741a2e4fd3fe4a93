#include "engine/speculation.h"

#include <algorithm>
#include <array>
#include <string>

#include <fmt/format.h>

#include "base/json.h"

namespace nibble {
namespace {

constexpr const char* kFlag = "--speculative-config";
constexpr int64_t kMostTokens = 64;
constexpr int64_t kMostLookup = 64;
constexpr std::array<std::string_view, 4> kLookupMembers = {
    "method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"};
constexpr std::array<std::string_view, 3> kModelMembers = {"method", "num_speculative_tokens",
                                                           "model"};

Status read_count(const Json& object, const char* name, int64_t most, int64_t& value) {
  const Json* member = object.find(name);
  if (member == nullptr) {
    return {};
  }
  if (!member->is_int() || member->as_int() < 1 || member->as_int() > most) {
    return make_error(StatusCode::kInvalidArgument, "{}: {} must be an integer from 1 to {}", kFlag,
                      name, most);
  }
  value = member->as_int();
  return {};
}

Status check_members(const Json& object, std::span<const std::string_view> known) {
  for (const auto& [name, value] : object.as_object()) {
    if (std::ranges::find(known, name) == known.end()) {
      return make_error(StatusCode::kUnsupported, "{}: unknown member {}; there are {}", kFlag,
                        name, fmt::join(known, ", "));
    }
  }
  return {};
}

// Of prompt lookup.
Status read_lookup(const Json& object, Speculation& out) {
  NIBBLE_RETURN_IF_ERROR(read_count(object, "prompt_lookup_max", kMostLookup, out.lookup_max));
  out.lookup_min = out.lookup_max;  // each is the other where it is not given
  NIBBLE_RETURN_IF_ERROR(read_count(object, "prompt_lookup_min", kMostLookup, out.lookup_min));
  if (object.find("prompt_lookup_max") == nullptr) {
    out.lookup_max = out.lookup_min;
  }
  if (out.lookup_min > out.lookup_max) {
    return make_error(StatusCode::kInvalidArgument,
                      "{}: prompt_lookup_min {} must not be above prompt_lookup_max {}", kFlag,
                      out.lookup_min, out.lookup_max);
  }
  return {};
}

Status read_model(const Json& object, Speculation& out) {
  const Json* const model = object.find("model");
  if (model == nullptr || !model->is_string() || model->as_string().empty()) {
    return make_error(StatusCode::kInvalidArgument,
                      "{}: the method \"draft_model\" needs model, the folder of a model with the "
                      "same vocabulary",
                      kFlag);
  }
  out.draft_model = model->as_string();
  return {};
}

}  // namespace

Result<Speculation> parse_speculation(std::string_view text) {
  const Result<Json> json = Json::parse(text);
  if (!json.ok() || !json->is_object()) {
    return make_error(StatusCode::kInvalidArgument,
                      "{}: expected a JSON object such as {{\"method\": \"ngram\", "
                      "\"num_speculative_tokens\": 8}}",
                      kFlag);
  }
  const Json* const method = json->find("method");
  const std::string name = method != nullptr && method->is_string() ? method->as_string() : "";
  const bool lookup = name == "ngram";
  if (method != nullptr && !lookup && name != "draft_model") {
    return make_error(StatusCode::kUnsupported,
                      "{}: only the methods \"ngram\" and \"draft_model\" are supported", kFlag);
  }
  if (method == nullptr || json->find("num_speculative_tokens") == nullptr) {
    return make_error(StatusCode::kInvalidArgument, "{}: needs method and num_speculative_tokens",
                      kFlag);
  }
  NIBBLE_RETURN_IF_ERROR(lookup ? check_members(*json, kLookupMembers)
                                : check_members(*json, kModelMembers));
  Speculation out;
  NIBBLE_RETURN_IF_ERROR(read_count(*json, "num_speculative_tokens", kMostTokens, out.tokens));
  NIBBLE_RETURN_IF_ERROR(lookup ? read_lookup(*json, out) : read_model(*json, out));
  return out;
}

std::vector<int32_t> look_up(std::span<const int32_t> tokens,
                             const Speculation& options,
                             int64_t most) {
  const auto size = std::ssize(tokens);
  const auto at = [&](int64_t index) { return tokens[static_cast<size_t>(index)]; };
  int64_t longest = 0;
  int64_t found = 0;  // one past the occurrence
  for (int64_t end = size - 1; end > 0 && longest < options.lookup_max; --end) {
    int64_t length = 0;
    while (length < std::min(options.lookup_max, end) &&
           at(end - 1 - length) == at(size - 1 - length)) {
      ++length;
    }
    if (length > longest) {
      longest = length;
      found = end;
    }
  }
  std::vector<int32_t> out;
  for (int64_t i = 0; i < most && longest >= options.lookup_min; ++i) {
    const int64_t from = found + i;
    out.push_back(from < size ? at(from) : out[static_cast<size_t>(from - size)]);
  }
  return out;
}

bool may_follow(std::span<const int32_t> tokens, const Speculation& options) {
  const auto size = std::ssize(tokens);
  const int64_t length = options.lookup_min - 1;  // the one that is missing is not known
  if (size <= length) {
    return false;
  }
  const auto end = tokens.last(static_cast<size_t>(length));
  const auto front = tokens.first(static_cast<size_t>(size - 1));
  return std::search(front.begin(), front.end(), end.begin(), end.end()) != front.end();
}

void SpeculationStats::count(int64_t proposed, int64_t accepted) {
  ++drafts;
  draft_tokens += proposed;
  accepted_tokens += accepted;
  accepted_at.resize(std::max(accepted_at.size(), static_cast<size_t>(proposed)));
  for (size_t place = 0; place < static_cast<size_t>(accepted); ++place) {
    ++accepted_at[place];
  }
}

}  // namespace nibble
