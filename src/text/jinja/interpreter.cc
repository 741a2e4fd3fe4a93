#include "text/jinja/interpreter.h"

#include <utility>

#include "text/jinja/operators.h"
#include "text/jinja/value_text.h"

namespace nibble::jinja {

Result<std::string> Interpreter::run(const Block& block) {
  NIBBLE_RETURN_IF_ERROR(execute(block).status());
  return std::move(output_);
}

Status Interpreter::locate(const Status& status, int line) {
  if (status.ok() || runtime_.error_is_located || runtime_.is_refused) {
    return status;
  }
  runtime_.error_is_located = true;
  return status.with_context(fmt::format("line {}", line));
}

Result<Interpreter::Flow> Interpreter::execute(const Block& block) {
  for (const auto& stmt : block) {
    NIBBLE_ASSIGN_OR_RETURN(const Flow flow, execute(*stmt));
    if (flow != Flow::kNext) {
      return flow;
    }
  }
  return Flow::kNext;
}

Result<Interpreter::Flow> Interpreter::execute(const Stmt& stmt) {
  const DepthGuard guard(*this);
  NIBBLE_RETURN_IF_ERROR(locate(guard.status(), stmt.line));
  Result<Flow> flow = dispatch(stmt);
  return flow.ok() ? flow : locate(flow.status(), stmt.line);
}

Result<Interpreter::Flow> Interpreter::dispatch(const Stmt& stmt) {
  Status status;
  switch (stmt.kind) {
    case StmtKind::kText:
      status = append_output(stmt.text);
      break;
    case StmtKind::kPrint: {
      NIBBLE_ASSIGN_OR_RETURN(const Value value, evaluate(*stmt.value));
      status = print(value);
      break;
    }
    case StmtKind::kIf:
      return execute_if(stmt);
    case StmtKind::kFor:
      status = execute_for(stmt);
      break;
    case StmtKind::kSet: {
      NIBBLE_ASSIGN_OR_RETURN(Value value, evaluate(*stmt.value));
      status = assign(*stmt.target, std::move(value));
      break;
    }
    case StmtKind::kSetBlock:
      status = execute_set_block(stmt);
      break;
    case StmtKind::kMacro: {
      NIBBLE_ASSIGN_OR_RETURN(Value macro, make_macro(stmt.macro));
      scope_->variables.insert_or_assign(stmt.macro.name, std::move(macro));
      break;
    }
    case StmtKind::kCallBlock:
      status = execute_call_block(stmt);
      break;
    case StmtKind::kFilterBlock:
      status = execute_filter_block(stmt);
      break;
    case StmtKind::kWith:
      status = execute_with(stmt);
      break;
    case StmtKind::kScope:
      status = in_new_scope([&](Scope&) { return execute(stmt.body).status(); });
      break;
    case StmtKind::kBreak:
      return Flow::kBreak;
    case StmtKind::kContinue:
      return Flow::kContinue;
  }
  return status.ok() ? Result<Flow>(Flow::kNext) : status;
}

Result<Interpreter::Flow> Interpreter::execute_if(const Stmt& stmt) {
  for (const Branch& branch : stmt.branches) {
    bool is_taken = branch.condition == nullptr;
    if (!is_taken) {
      NIBBLE_ASSIGN_OR_RETURN(const Value condition, evaluate(*branch.condition));
      is_taken = condition.truthy();
    }
    if (is_taken) {
      return execute(branch.body);
    }
  }
  return Flow::kNext;
}

Status Interpreter::append_output(const std::string& text) {
  NIBBLE_RETURN_IF_ERROR(runtime_.charge(text.size()));
  if (out_->size() + text.size() > runtime_.limits().output_bytes) {
    return template_error("the rendered text is longer than {} bytes",
                          runtime_.limits().output_bytes);
  }
  *out_ += text;
  return {};
}

Status Interpreter::print(const Value& value) {
  if (value.is_string()) {
    return append_output(value.as_string());
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, to_text(value, runtime_));
  return append_output(text);
}

Status Interpreter::in_new_scope(const std::function<Status(Scope&)>& action) {
  NIBBLE_ASSIGN_OR_RETURN(Scope * inner, runtime_.scope(scope_));
  Scope* const outer = std::exchange(scope_, inner);
  Status status = action(*inner);
  scope_ = outer;
  return status;
}

Result<std::string> Interpreter::capture(const std::function<Status()>& action) {
  std::string text;
  std::string* const outer = std::exchange(out_, &text);
  const Status status = action();
  out_ = outer;
  NIBBLE_RETURN_IF_ERROR(status);
  return text;
}

Result<Value> Interpreter::filter_text(const Expr& filters, std::string text) {
  NIBBLE_ASSIGN_OR_RETURN(Value value, runtime_.string(std::move(text)));
  block_texts_.push_back(std::move(value));
  Result<Value> filtered = evaluate(filters);
  block_texts_.pop_back();
  return filtered;
}

Status Interpreter::execute_set_block(const Stmt& stmt) {
  NIBBLE_ASSIGN_OR_RETURN(
      std::string text,
      capture([&] { return in_new_scope([&](Scope&) { return execute(stmt.body).status(); }); }));
  NIBBLE_ASSIGN_OR_RETURN(Value value, filter_text(*stmt.value, std::move(text)));
  return assign(*stmt.target, std::move(value));
}

Status Interpreter::execute_filter_block(const Stmt& stmt) {
  NIBBLE_ASSIGN_OR_RETURN(
      std::string text,
      capture([&] { return in_new_scope([&](Scope&) { return execute(stmt.body).status(); }); }));
  NIBBLE_ASSIGN_OR_RETURN(const Value value, filter_text(*stmt.value, std::move(text)));
  return print(value);
}

Status Interpreter::execute_with(const Stmt& stmt) {
  std::vector<Value> values;  // seen from outside: names of the same tag do not see each other
  for (const Branch& binding : stmt.branches) {
    NIBBLE_ASSIGN_OR_RETURN(Value value, evaluate(*binding.value));
    values.push_back(std::move(value));
  }
  return in_new_scope([&](Scope& scope) {
    for (size_t i = 0; i < values.size(); ++i) {
      scope.variables.insert_or_assign(stmt.branches[i].condition->name, values[i]);
    }
    return execute(stmt.body).status();
  });
}

Status Interpreter::assign(const Expr& target, Value value) {
  if (target.kind == ExprKind::kName) {
    NIBBLE_RETURN_IF_ERROR(runtime_.charge(kItemWork));
    scope_->variables.insert_or_assign(target.name, std::move(value));
    return {};
  }
  if (target.kind == ExprKind::kTuple) {
    return assign_tuple(target, value);
  }
  NIBBLE_ASSIGN_OR_RETURN(const Value object, evaluate(*target.children[0]));
  if (target.kind != ExprKind::kAttribute || !object.is(Value::Kind::kNamespace)) {
    return template_error("cannot assign attribute on non-namespace object");
  }
  NIBBLE_RETURN_IF_ERROR(runtime_.charge(kItemWork));
  object.as_namespace()->members->set(target.name, std::move(value));
  return {};
}

Status Interpreter::assign_tuple(const Expr& target, const Value& value) {
  if (value.is_undefined()) {
    return Status(StatusCode::kInvalidArgument, value.why_undefined());
  }
  NIBBLE_ASSIGN_OR_RETURN(std::vector<Value> items, iterate(value, runtime_));
  if (items.size() != target.children.size()) {
    return template_error("cannot unpack {} values into {} names", items.size(),
                          target.children.size());
  }
  for (size_t i = 0; i < items.size(); ++i) {
    NIBBLE_RETURN_IF_ERROR(assign(*target.children[i], std::move(items[i])));
  }
  return {};
}

}  // namespace nibble::jinja
