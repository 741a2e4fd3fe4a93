#include "text/chat_template.h"

#include <utility>

#include "text/jinja/globals.h"
#include "text/jinja/interpreter.h"
#include "text/jinja/parser.h"
#include "text/jinja/runtime.h"

namespace nibble {
namespace {

std::tm local_time() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  localtime_r(&now, &parts);
  return parts;
}

// Later names replace earlier ones, so that extra cannot hide the messages.
Status define_inputs(const ChatInputs& inputs, jinja::Scope& scope, jinja::Runtime& runtime) {
  const auto define = [&](const std::string& name, const Json& json) -> Status {
    NIBBLE_ASSIGN_OR_RETURN(jinja::Value value, runtime.from_json(json));
    scope.variables.insert_or_assign(name, std::move(value));
    return {};
  };
  if (inputs.bos_token.has_value()) {
    NIBBLE_RETURN_IF_ERROR(define("bos_token", Json(*inputs.bos_token)));
  }
  if (inputs.eos_token.has_value()) {
    NIBBLE_RETURN_IF_ERROR(define("eos_token", Json(*inputs.eos_token)));
  }
  NIBBLE_RETURN_IF_ERROR(define("documents", Json()));
  if (inputs.extra.is_object()) {
    for (const auto& [name, value] : inputs.extra.as_object()) {
      NIBBLE_RETURN_IF_ERROR(define(name, value));
    }
  }
  NIBBLE_RETURN_IF_ERROR(define("messages", inputs.messages));
  NIBBLE_RETURN_IF_ERROR(define("tools", inputs.tools.value_or(Json())));
  return define("add_generation_prompt", Json(inputs.generation_prompt == GenerationPrompt::kAdd));
}

}  // namespace

Result<ChatTemplate> ChatTemplate::parse(std::string_view source, std::string name) {
  Result<jinja::ParsedTemplate> parsed = jinja::parse_template(source);
  if (!parsed.ok()) {
    return parsed.status().with_context(fmt::format("chat template {}", name));
  }
  return ChatTemplate(std::make_shared<const jinja::ParsedTemplate>(std::move(parsed).value()),
                      std::move(name), std::string(source));
}

Result<std::string> ChatTemplate::render(const ChatInputs& inputs) const {
  if (!inputs.messages.is_array()) {
    return make_error(StatusCode::kInvalidArgument, "messages: expected an array");
  }
  if (!inputs.extra.is_null() && !inputs.extra.is_object()) {
    return make_error(StatusCode::kInvalidArgument, "chat_template_kwargs: expected an object");
  }
  jinja::Runtime runtime{jinja::Limits()};
  runtime.now = inputs.now.has_value() ? *inputs.now : local_time();
  NIBBLE_ASSIGN_OR_RETURN(jinja::Scope * globals, runtime.scope(nullptr));
  NIBBLE_RETURN_IF_ERROR(jinja::define_globals(*globals, runtime));
  NIBBLE_RETURN_IF_ERROR(define_inputs(inputs, *globals, runtime));
  NIBBLE_ASSIGN_OR_RETURN(jinja::Scope * root, runtime.scope(globals));
  jinja::Interpreter interpreter(runtime, root);
  Result<std::string> text = interpreter.run(parsed_->body);
  // A refusal by raise_exception is the template's own sentence; other failures name the place.
  if (!text.ok() && !runtime.is_refused) {
    return text.status().with_context(fmt::format("chat template {}", name_));
  }
  return text;
}

}  // namespace nibble
