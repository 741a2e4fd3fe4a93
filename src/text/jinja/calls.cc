#include <algorithm>
#include <utility>

#include "text/jinja/interpreter.h"
#include "text/jinja/operators.h"

namespace nibble::jinja {

Status Interpreter::execute_for(const Stmt& stmt) {
  NIBBLE_ASSIGN_OR_RETURN(const Value sequence, evaluate(*stmt.value));
  NIBBLE_ASSIGN_OR_RETURN(std::vector<Value> items, iterate(sequence, runtime_));
  return run_loop(stmt, std::move(items), 0);
}

Result<std::vector<Value>> Interpreter::filter_items(const Stmt& stmt, std::vector<Value> items) {
  if (stmt.condition == nullptr) {
    return items;
  }
  std::vector<Value> kept;
  NIBBLE_RETURN_IF_ERROR(in_new_scope([&](Scope&) -> Status {
    for (Value& item : items) {
      NIBBLE_RETURN_IF_ERROR(assign(*stmt.target, item));
      NIBBLE_ASSIGN_OR_RETURN(const Value passes, evaluate(*stmt.condition));
      if (passes.truthy()) {
        kept.push_back(std::move(item));
      }
    }
    return {};
  }));
  return kept;
}

Status Interpreter::run_loop(const Stmt& stmt, std::vector<Value> items, size_t depth) {
  NIBBLE_ASSIGN_OR_RETURN(items, filter_items(stmt, std::move(items)));
  NIBBLE_ASSIGN_OR_RETURN(Loop * loop, runtime_.loop());
  loop->items = std::move(items);
  loop->depth = depth;
  if (stmt.is_recursive) {
    Scope* const around = scope_;
    loop->recurse = [this, &stmt, depth, around](Runtime& runtime,
                                                 Arguments& args) -> Result<Value> {
      NIBBLE_ASSIGN_OR_RETURN(const auto a, bind({"loop", {"iterable"}, 1}, args));
      NIBBLE_ASSIGN_OR_RETURN(std::vector<Value> inner, iterate(a[0], runtime));
      Scope* const caller = std::exchange(scope_, around);
      Result<std::string> text =
          capture([&] { return run_loop(stmt, std::move(inner), depth + 1); });
      scope_ = caller;
      NIBBLE_RETURN_IF_ERROR(text.status());
      return runtime.string(std::move(text).value());
    };
  }
  bool is_completed = false;
  NIBBLE_RETURN_IF_ERROR(in_new_scope([&](Scope& scope) -> Status {
    NIBBLE_ASSIGN_OR_RETURN(is_completed, run_iterations(stmt, *loop, scope));
    return {};
  }));
  return is_completed ? Status()
                      : in_new_scope([&](Scope&) { return execute(stmt.otherwise).status(); });
}

Result<bool> Interpreter::run_iterations(const Stmt& stmt, Loop& loop, Scope& scope) {
  bool is_completed = false;
  for (loop.index = 0; loop.index < loop.items.size(); ++loop.index) {
    NIBBLE_RETURN_IF_ERROR(runtime_.charge(kNodeWork));
    scope.variables.clear();
    scope.variables.emplace("loop", Value::loop(&loop));
    NIBBLE_RETURN_IF_ERROR(assign(*stmt.target, loop.items[loop.index]));
    NIBBLE_ASSIGN_OR_RETURN(const Flow flow, execute(stmt.body));
    if (flow == Flow::kBreak) {
      break;
    }
    is_completed = is_completed || flow == Flow::kNext;
  }
  return is_completed;
}

Result<Value> Interpreter::make_macro(const MacroDefinition& macro) {
  Scope* const defined_in = scope_;
  return runtime_.callable(macro.name, [this, &macro, defined_in](Runtime&, Arguments& arguments) {
    return call_macro(macro, defined_in, arguments);
  });
}

Result<Value> Interpreter::call_macro(const MacroDefinition& macro,
                                      Scope* defined_in,
                                      Arguments& arguments) {
  Scope* const caller = std::exchange(scope_, defined_in);
  Result<std::string> text = capture([&] {
    return in_new_scope([&](Scope& scope) -> Status {
      NIBBLE_RETURN_IF_ERROR(bind_parameters(macro, scope, arguments));
      return execute(macro.body).status();
    });
  });
  scope_ = caller;
  NIBBLE_RETURN_IF_ERROR(text.status());
  return runtime_.string(std::move(text).value());
}

Status Interpreter::bind_parameters(const MacroDefinition& macro,
                                    Scope& scope,
                                    Arguments& arguments) {
  const std::vector<Parameter>& parameters = macro.parameters;
  const size_t direct = std::min(arguments.positional.size(), parameters.size());
  if (arguments.positional.size() > direct && !macro.uses_varargs) {
    return template_error("macro '{}' takes not more than {} argument(s)", macro.name,
                          parameters.size());
  }
  for (size_t i = 0; i < direct; ++i) {
    scope.variables.insert_or_assign(parameters[i].name, arguments.positional[i]);
  }
  NIBBLE_ASSIGN_OR_RETURN(const Value extra, runtime_.dict());
  bool has_caller = false;
  for (const auto& [name, value] : arguments.named) {
    const auto parameter = std::find_if(parameters.begin(), parameters.end(),
                                        [&n = name](const Parameter& p) { return p.name == n; });
    if (parameter != parameters.end()) {
      if (!scope.variables.emplace(name, value).second) {
        return template_error("macro '{}' got two values for its argument '{}'", macro.name, name);
      }
    } else if (name == "caller" && macro.uses_caller) {
      scope.variables.insert_or_assign(name, value);
      has_caller = true;
    } else if (macro.uses_kwargs) {
      extra.as_dict()->set(name, value);
    } else {
      return template_error("macro '{}' takes no keyword argument '{}'", macro.name, name);
    }
  }
  for (const Parameter& parameter : parameters) {
    if (scope.variables.contains(parameter.name)) {
      continue;
    }
    Value value = Value::undefined(fmt::format("parameter '{}' was not provided", parameter.name));
    if (parameter.fallback != nullptr) {
      NIBBLE_ASSIGN_OR_RETURN(value, evaluate(*parameter.fallback));
    }
    scope.variables.insert_or_assign(parameter.name, std::move(value));
  }
  if (macro.uses_varargs) {
    NIBBLE_ASSIGN_OR_RETURN(Value rest, runtime_.tuple({arguments.positional.begin() +
                                                            static_cast<std::ptrdiff_t>(direct),
                                                        arguments.positional.end()}));
    scope.variables.emplace("varargs", std::move(rest));
  }
  if (macro.uses_kwargs) {
    scope.variables.emplace("kwargs", extra);
  }
  if (macro.uses_caller && !has_caller) {
    scope.variables.emplace("caller", Value::undefined("No caller defined"));
  }
  return {};
}

Status Interpreter::execute_call_block(const Stmt& stmt) {
  const Expr& expr = *stmt.value;
  NIBBLE_ASSIGN_OR_RETURN(const Value callee, evaluate(*expr.children[0]));
  NIBBLE_ASSIGN_OR_RETURN(Arguments arguments, evaluate_arguments(expr.arguments));
  NIBBLE_ASSIGN_OR_RETURN(Value caller, make_macro(stmt.macro));
  arguments.named.emplace_back("caller", std::move(caller));
  NIBBLE_ASSIGN_OR_RETURN(const Value result, call(callee, arguments));
  return print(result);
}

Result<Value> Interpreter::call(const Value& callee, Arguments& arguments) {
  if (callee.is_undefined()) {
    return Status(StatusCode::kInvalidArgument, callee.why_undefined());
  }
  if (callee.is(Value::Kind::kLoop) && callee.as_loop()->recurse) {
    return callee.as_loop()->recurse(runtime_, arguments);
  }
  if (callee.is(Value::Kind::kLoop)) {
    return template_error("only a loop marked 'recursive' can be called");
  }
  if (!callee.is(Value::Kind::kCallable)) {
    return template_error("'{}' object is not callable", callee.type_name());
  }
  return callee.as_callable()->invoke(runtime_, arguments);
}

Result<Arguments> Interpreter::evaluate_arguments(const std::vector<Argument>& arguments) {
  Arguments evaluated;
  for (const Argument& argument : arguments) {
    NIBBLE_ASSIGN_OR_RETURN(Value value, evaluate(*argument.value));
    switch (argument.kind) {
      case Argument::Kind::kPositional:
        evaluated.positional.push_back(std::move(value));
        break;
      case Argument::Kind::kNamed:
        evaluated.named.emplace_back(argument.name, std::move(value));
        break;
      case Argument::Kind::kSpread: {
        NIBBLE_ASSIGN_OR_RETURN(const std::vector<Value> items, iterate(value, runtime_));
        evaluated.positional.insert(evaluated.positional.end(), items.begin(), items.end());
        break;
      }
      case Argument::Kind::kSpreadNamed:
        if (!value.is(Value::Kind::kDict)) {
          return template_error("argument after ** must be a mapping, not {}", value.type_name());
        }
        for (const Dict::Member& member : value.as_dict()->members()) {
          if (!member.key.is_string()) {
            return template_error("keywords must be strings");
          }
          NIBBLE_RETURN_IF_ERROR(runtime_.charge(kItemWork));
          evaluated.named.emplace_back(member.key.as_string(), member.value);
        }
        break;
    }
  }
  return evaluated;
}

}  // namespace nibble::jinja
