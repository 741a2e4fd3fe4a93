#include "server/asked_form.h"

#include <algorithm>
#include <array>
#include <utility>

#include <fmt/format.h>

#include "server/field_reader.h"

namespace nibble {
namespace {

using Kind = AskedForm::Kind;

struct Field {
  std::string_view name;
  Kind kind;
};

// At the top of a request.
constexpr std::array kFields = {
    Field{"json_schema", Kind::kJsonSchema},
    Field{"regex", Kind::kRegex},
    Field{"ebnf", Kind::kEbnf},
    Field{"guided_json", Kind::kJsonSchema},
    Field{"guided_regex", Kind::kRegex},
    Field{"guided_choice", Kind::kChoice},
    Field{"guided_grammar", Kind::kEbnf},
};
// Within structured_outputs.
constexpr std::array kStructured = {
    Field{"json", Kind::kJsonSchema},        Field{"regex", Kind::kRegex},
    Field{"choice", Kind::kChoice},          Field{"grammar", Kind::kEbnf},
    Field{"json_object", Kind::kJsonObject},
};

class FormReader final {
 public:
  explicit FormReader(FieldReader& fields) : fields_(fields) {}

  AskedForm read() {
    for (const Field& field : kFields) {
      if (const Json* value = fields_.find(field.name)) {
        take(field.kind, std::string(field.name), *value);
      }
    }
    read_structured();
    read_response_format();
    return std::move(form_);
  }

 private:
  void read_structured() {
    const Json* outer = fields_.find("structured_outputs");
    if (outer == nullptr) {
      return;
    }
    if (!outer->is_object()) {
      fields_.fail("structured_outputs", "structured_outputs: expected an object");
      return;
    }
    for (const auto& [key, value] : outer->as_object()) {
      const auto* const field = std::ranges::find(kStructured, key, &Field::name);
      if (value.is_null()) {
        continue;
      }
      if (field == kStructured.end()) {
        fields_.fail("structured_outputs",
                     "structured_outputs: one of json, regex, choice, grammar and json_object is "
                     "read; leave out the other members");
        return;
      }
      take(field->kind, fmt::format("structured_outputs.{}", key), value);
    }
  }

  void read_response_format() {
    const Json* format = fields_.find("response_format");
    if (format == nullptr) {
      return;
    }
    const Json* type = format->find("type");
    if (type == nullptr || !type->is_string()) {
      fields_.fail("response_format", "response_format: expected an object with a string \"type\"");
    } else if (type->as_string() == "json_object") {
      take(Kind::kJsonObject, "response_format", true);
    } else if (type->as_string() == "json_schema") {
      const Json* inner = format->find("json_schema");
      const Json* schema = inner != nullptr ? inner->find("schema") : nullptr;
      if (schema == nullptr) {
        fields_.fail("response_format.json_schema",
                     "response_format.json_schema: expected an object with a \"schema\"");
        return;
      }
      take(Kind::kJsonSchema, "response_format.json_schema.schema", *schema);
    } else if (type->as_string() != "text") {
      fields_.fail("response_format",
                   "response_format: the types text, json_object and json_schema are supported");
    }
  }

  void take(Kind kind, std::string param, const Json& value) {
    if (kind == Kind::kJsonObject && value.is_bool() && !value.as_bool()) {
      return;
    }
    if (form_.kind != Kind::kFree) {
      fields_.fail(param, fmt::format("{}: {} asks for another form already; keep one of them",
                                      param, form_.param));
      return;
    }
    form_.kind = kind;
    form_.param = std::move(param);
    switch (kind) {
      case Kind::kJsonSchema:
        take_schema(value);
        break;
      case Kind::kRegex:
      case Kind::kEbnf:
        value.is_string() ? void(form_.text = value.as_string())
                          : fields_.fail(form_.param, form_.param + ": expected a string");
        break;
      case Kind::kChoice:
        take_choices(value);
        break;
      case Kind::kJsonObject:
      case Kind::kFree:
        break;
    }
  }

  /// A schema, or the text of one.
  void take_schema(const Json& value) {
    form_.schema = value;
    if (value.is_string()) {
      auto parsed = Json::parse(value.as_string());
      if (!parsed.ok()) {
        fields_.fail(form_.param, form_.param + ": not valid JSON: " + parsed.status().message());
        return;
      }
      form_.schema = std::move(parsed).value();
    }
    if (!form_.schema.is_object() && !form_.schema.is_bool()) {
      fields_.fail(form_.param, form_.param + ": expected a schema, an object");
    }
  }

  void take_choices(const Json& value) {
    constexpr size_t kMostChoices = 4096;
    const bool strings = value.is_array() && !value.as_array().empty() &&
                         value.as_array().size() <= kMostChoices &&
                         std::ranges::all_of(value.as_array(), [](const Json& each) {
                           return each.is_string() && !each.as_string().empty();
                         });
    if (!strings) {
      fields_.fail(form_.param, fmt::format("{}: expected an array of 1 to {} strings, none empty",
                                            form_.param, kMostChoices));
      return;
    }
    for (const Json& each : value.as_array()) {
      form_.choices.push_back(each.as_string());
    }
  }

  FieldReader& fields_;
  AskedForm form_;
};

}  // namespace

AskedForm read_asked_form(FieldReader& fields) { return FormReader(fields).read(); }

}  // namespace nibble
