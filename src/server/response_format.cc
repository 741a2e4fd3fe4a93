#include "server/response_format.h"

#include <ctime>
#include <utility>

#include <fmt/format.h>

namespace nibble {
namespace {

Json usage_of_response(const Usage& usage) {
  return Json::object(
      {{"input_tokens", usage.prompt_tokens},
       {"input_tokens_details",
        Json::object({{"cached_tokens", usage.cached_tokens}, {"cache_write_tokens", 0}})},
       {"output_tokens", usage.completion_tokens},
       {"output_tokens_details", Json::object({{"reasoning_tokens", usage.reasoning_tokens}})},
       {"total_tokens", usage.prompt_tokens + usage.completion_tokens}});
}

const char* status_of(const std::string& finish_reason) {
  if (finish_reason == "length") {
    return "incomplete";
  }
  return finish_reason == "abort" ? "cancelled" : "completed";
}

}  // namespace

ResponseFormat::ResponseFormat(ResponsePlan plan) : plan_(std::move(plan)) {}

/// What never ended cannot be asked for.
ResponseFormat::~ResponseFormat() {
  if (plan_.store && !kept_) {
    plan_.store->erase(plan_.id);
  }
}

std::string ResponseFormat::whole_body(const std::vector<Choice>& choices, const Usage& total) {
  const Choice& choice = choices.front();
  for (const AnswerPiece& piece : choice.unsent) {
    (void)stream_piece(choice, piece, 0);
  }
  (void)stream_choice_end(choice);
  return finished(total).dump();
}

std::string ResponseFormat::stream_begin(const Choice& /*choice*/) {
  const Json begun = response("in_progress", Json());
  if (plan_.store) {
    plan_.store->put(plan_.id, {.response = begun.dump(), .items = ""});
  }
  std::string out = event("response.created", {{"response", begun}});
  return out += event("response.in_progress", {{"response", begun}});
}

std::string ResponseFormat::stream_piece(const Choice& /*choice*/,
                                         const AnswerPiece& piece,
                                         int64_t /*call*/) {
  switch (piece.kind) {
    case Kind::kContent:
    case Kind::kReasoning:
      return add_text(piece.kind, piece.text);
    case Kind::kCallBegin:
      return open_call(piece);
    case Kind::kArguments: {
      text_ += piece.text;
      Members members = place();
      members.emplace_back("delta", piece.text);
      return event("response.function_call_arguments.delta", std::move(members));
    }
    case Kind::kCallEnd:
      return close_item("completed");
  }
  return {};
}

std::string ResponseFormat::stream_choice_end(const Choice& choice) {
  ended_ = choice.finish_reason;
  const bool whole = ended_ != "length" && ended_ != "abort";
  return close_item(whole ? "completed" : "incomplete");
}

std::string ResponseFormat::stream_end(const Usage& total) {
  const Json response = finished(total);
  const bool completed = response.find("status")->as_string() == "completed";
  return event(completed ? "response.completed" : "response.incomplete", {{"response", response}});
}

std::string ResponseFormat::stream_failure(const ApiError& error) {
  Json failed = response("failed", Json());
  const char* code = error.status == 429 ? "rate_limit_exceeded" : "server_error";
  failed.set("error", Json::object({{"code", code}, {"message", error.message}}));
  return event("response.failed", {{"response", std::move(failed)}});
}

std::string ResponseFormat::event(const char* type, Members members) {
  members.emplace(members.begin(), "type", type);
  members.emplace_back("sequence_number", sequence_++);
  return named_event(Json::object(std::move(members)));
}

Json ResponseFormat::response(const char* status, const Json& usage) const {
  Json out = Json::object({{"id", plan_.id},
                           {"object", "response"},
                           {"status", status},
                           {"error", Json()},
                           {"incomplete_details", Json()},
                           {"output", output_},
                           {"usage", usage}});
  for (const auto& [name, value] : plan_.members.as_object()) {
    out.set(name, value);
  }
  return out;
}

/// The object at the end, which is kept if it is to be.
Json ResponseFormat::finished(const Usage& total) {
  Json out = response(status_of(ended_), usage_of_response(total));
  if (ended_ == "length") {
    out.set("incomplete_details", Json::object({{"reason", "max_output_tokens"}}));
  }
  out.set("completed_at", ended_ == "abort" ? Json() : Json(int64_t{std::time(nullptr)}));
  if (plan_.store) {
    JsonArray items = std::move(plan_.items);
    items.insert(items.end(), output_.begin(), output_.end());
    plan_.store->put(plan_.id, {.response = out.dump(), .items = Json(std::move(items)).dump()});
    kept_ = true;
  }
  return out;
}

/// Where the open item stands.
ResponseFormat::Members ResponseFormat::place() const {
  return {{"item_id", *open_.find("id")}, {"output_index", static_cast<int64_t>(output_.size())}};
}

/// Where its only part stands.
ResponseFormat::Members ResponseFormat::part_place() const {
  Members members = place();
  members.emplace_back("content_index", 0);
  return members;
}

Json ResponseFormat::part(const std::string& text) const {
  if (kind_ == Kind::kReasoning) {
    return Json::object({{"type", "reasoning_text"}, {"text", text}});
  }
  return Json::object({{"type", "output_text"},
                       {"text", text},
                       {"annotations", JsonArray()},
                       {"logprobs", JsonArray()}});
}

std::string ResponseFormat::item_id(const char* prefix) const {
  return fmt::format("{}_{}_{}", prefix, plan_.id, output_.size());
}

std::string ResponseFormat::open_item(Kind kind, Json item) {
  std::string out = close_item("completed");
  kind_ = kind;
  text_.clear();
  open_ = std::move(item);
  return out + event("response.output_item.added",
                     {{"output_index", static_cast<int64_t>(output_.size())}, {"item", open_}});
}

/// Text of an item of this kind that is open, or of a new one.
std::string ResponseFormat::add_text(Kind kind, const std::string& text) {
  const bool reasoning = kind == Kind::kReasoning;
  std::string out;
  if (open_.is_null() || kind_ != kind) {
    out = close_item("completed");
    out += open_item(kind, reasoning ? Json::object({{"id", item_id("rs")},
                                                     {"type", "reasoning"},
                                                     {"status", "in_progress"},
                                                     {"summary", JsonArray()},
                                                     {"content", JsonArray()}})
                                     : Json::object({{"id", item_id("msg")},
                                                     {"type", "message"},
                                                     {"status", "in_progress"},
                                                     {"role", "assistant"},
                                                     {"content", JsonArray()}}));
    Members members = part_place();
    members.emplace_back("part", part(""));
    out += event("response.content_part.added", std::move(members));
  }
  text_ += text;
  Members members = part_place();
  members.emplace_back("delta", text);
  if (!reasoning) {
    members.emplace_back("logprobs", JsonArray());
  }
  return out + event(reasoning ? "response.reasoning_text.delta" : "response.output_text.delta",
                     std::move(members));
}

std::string ResponseFormat::open_call(const AnswerPiece& piece) {
  std::string out = close_item("completed");
  return out + open_item(Kind::kCallBegin, Json::object({{"id", item_id("fc")},
                                                         {"type", "function_call"},
                                                         {"status", "in_progress"},
                                                         {"call_id", piece.id},
                                                         {"name", piece.text},
                                                         {"arguments", ""}}));
}

std::string ResponseFormat::close_item(const char* status) {
  if (open_.is_null()) {
    return {};
  }
  std::string out = kind_ == Kind::kCallBegin ? close_call() : close_text();
  open_.set("status", status);
  out += event("response.output_item.done",
               {{"output_index", static_cast<int64_t>(output_.size())}, {"item", open_}});
  output_.push_back(std::exchange(open_, Json()));
  return out;
}

std::string ResponseFormat::close_text() {
  const bool reasoning = kind_ == Kind::kReasoning;
  const Json whole = part(text_);
  Members members = part_place();
  members.emplace_back("text", text_);
  if (!reasoning) {
    members.emplace_back("logprobs", JsonArray());
  }
  std::string out = event(reasoning ? "response.reasoning_text.done" : "response.output_text.done",
                          std::move(members));
  members = part_place();
  members.emplace_back("part", whole);
  open_.set("content", JsonArray{whole});
  return out + event("response.content_part.done", std::move(members));
}

std::string ResponseFormat::close_call() {
  Members members = place();
  members.emplace_back("name", *open_.find("name"));
  members.emplace_back("arguments", text_);
  open_.set("arguments", text_);
  return event("response.function_call_arguments.done", std::move(members));
}

}  // namespace nibble
