#include "bench/client/target.h"

#include <thread>
#include <utility>

#include "base/log.h"
#include "net/served_model.h"

namespace nibble {
namespace {

using Clock = HttpClient::Clock;

constexpr auto kPause = std::chrono::milliseconds(500);

Json ids_json(const std::vector<int32_t>& ids) {
  JsonArray out;
  for (const int32_t id : ids) {
    out.emplace_back(id);
  }
  return out;
}

Json messages_of(const Prompt& prompt) {
  if (prompt.messages.is_array()) {
    return prompt.messages;
  }
  JsonArray messages;
  messages.push_back(Json::object({{"role", "user"}, {"content", prompt.text}}));
  return messages;
}

Json prompt_json(const Prompt& prompt) {
  return prompt.ids.empty() ? Json(prompt.text) : ids_json(prompt.ids);
}

void add_options(Json& body, const BodyOptions& options) {
  if (options.temperature) {
    body.set("temperature", *options.temperature);
  }
  if (options.ignore_eos) {
    body.set("ignore_eos", true);
  }
  if (!options.stop.empty()) {
    body.set("stop", JsonArray(options.stop.begin(), options.stop.end()));
  }
}

Json generate_body(const Prompt& prompt, const BodyOptions& options) {
  Json sampling = Json::object({{"max_new_tokens", prompt.output_len}});
  add_options(sampling, options);
  Json body = Json::object({{prompt.ids.empty() ? "text" : "input_ids", prompt_json(prompt)}});
  body.set("sampling_params", std::move(sampling));
  body.set("stream", true);
  return body;
}

}  // namespace

Target::Target(TargetOptions options, std::string url, std::unique_ptr<HttpClient> client)
    : options_(std::move(options)), url_(std::move(url)), client_(std::move(client)) {
  load_.api = options_.api;
  load_.route =
      options_.endpoint.empty() ? std::string(answer_route(options_.api)) : options_.endpoint;
  load_.timing = options_.timing;
  load_.headers = options_.headers;
  if (!options_.api_key.empty()) {
    load_.headers.push_back({"Authorization", "Bearer " + options_.api_key});
  }
}

Result<Target> Target::open(const TargetOptions& options) {
  NIBBLE_ASSIGN_OR_RETURN(const Url url, parse_url(options.base_url));
  NIBBLE_ASSIGN_OR_RETURN(auto client, HttpClient::create(url, options.http));
  Target target(options, url.text(), std::move(client));
  if (target.options_.model.empty() && options.api != AnswerApi::kGenerate) {
    const Status found = target.until_ready([&] { return target.find_model(); });
    NIBBLE_RETURN_IF_ERROR(found.with_context(target.url_));
  }
  return target;
}

template <typename Try>
Status Target::until_ready(const Try& attempt) {
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                      std::chrono::duration<double>(options_.ready_s));
  bool told = false;
  while (true) {
    const Status status = attempt();
    if (status.code() != StatusCode::kUnavailable || Clock::now() + kPause > end) {
      return status;
    }
    if (!std::exchange(told, true)) {
      NIBBLE_LOG(kInfo, "{}: {}; waiting up to {} s", url_, status.message(), options_.ready_s);
    }
    std::this_thread::sleep_for(kPause);
  }
}

Status Target::find_model() {
  NIBBLE_ASSIGN_OR_RETURN(options_.model, first_served_model(*client_, load_.headers));
  return {};
}

Status Target::try_out(const std::string& body) {
  const Status status = until_ready([&] {
    LoadPlan plan;
    plan.requests.push_back({.body = body, .input_len = -1});
    return run_load(*client_, load_, std::move(plan), nullptr).records.front().status;
  });
  return status.with_context(url_);
}

std::optional<double> Target::accept_length() {
  const auto answer = fetch_ok(*client_, "/get_server_info", load_.headers);
  const auto json = answer.ok() ? Json::parse(answer->body) : Result<Json>(answer.status());
  const Json* states = json.ok() ? json->find("internal_states") : nullptr;
  if (states == nullptr || !states->is_array() || states->as_array().empty()) {
    return std::nullopt;
  }
  const Json* length = states->as_array().front().find("avg_spec_accept_length");
  return length != nullptr && length->is_number() ? std::optional(length->as_double())
                                                  : std::nullopt;
}

std::string Target::body(const Prompt& prompt, const BodyOptions& options) const {
  Json body;
  if (options_.api == AnswerApi::kGenerate) {
    body = generate_body(prompt, options);
  } else {
    const bool chat = options_.api == AnswerApi::kChat;
    const bool new_name = chat && options_.timing == LoadTiming::kVllm;
    body = Json::object(
        {{"model", options_.model},
         {chat ? "messages" : "prompt", chat ? messages_of(prompt) : prompt_json(prompt)},
         {new_name ? "max_completion_tokens" : "max_tokens", prompt.output_len},
         {"stream", true},
         {"stream_options", Json::object({{"include_usage", true}})}});
    add_options(body, options);
  }
  if (options.extra.is_object()) {
    for (const auto& [key, value] : options.extra.as_object()) {
      body.set(key, value);
    }
  }
  return body.dump();
}

}  // namespace nibble
