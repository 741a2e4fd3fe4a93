#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/status.h"
#include "text/jinja/ast.h"
#include "text/jinja/runtime.h"

namespace nibble::jinja {

/// Walks a parsed template. One use: construct, run. The tree must outlive it.
class Interpreter final {
 public:
  /// `root` holds the globals and inputs.
  Interpreter(Runtime& runtime, Scope* root) : runtime_(runtime), scope_(root) {}

  /// The rendered text. Errors: kInvalidArgument with "line N: ..." in front, or the bare message
  /// of raise_exception.
  Result<std::string> run(const Block& block);

 private:
  enum class Flow { kNext, kBreak, kContinue };
  class DepthGuard;

  // Statements: interpreter.cc
  Result<Flow> execute(const Block& block);
  Result<Flow> execute(const Stmt& stmt);
  Result<Flow> dispatch(const Stmt& stmt);
  Result<Flow> execute_if(const Stmt& stmt);
  Status execute_set_block(const Stmt& stmt);
  Status execute_filter_block(const Stmt& stmt);
  Status execute_with(const Stmt& stmt);
  Status assign(const Expr& target, Value value);
  Status assign_tuple(const Expr& target, const Value& value);
  Status print(const Value& value);
  Status append_output(const std::string& text);
  Status in_new_scope(const std::function<Status(Scope&)>& action);
  // What `action` prints, instead of printing it.
  Result<std::string> capture(const std::function<Status()>& action);
  Result<Value> filter_text(const Expr& filters, std::string text);

  // Loops, macros and calls: calls.cc
  Status execute_for(const Stmt& stmt);
  Status run_loop(const Stmt& stmt, std::vector<Value> items, size_t depth);
  // True if some iteration ran to its end: else Jinja2 prints the else part, also after a break.
  Result<bool> run_iterations(const Stmt& stmt, Loop& loop, Scope& scope);
  Result<std::vector<Value>> filter_items(const Stmt& stmt, std::vector<Value> items);
  Result<Value> make_macro(const MacroDefinition& macro);
  Result<Value> call_macro(const MacroDefinition& macro, Scope* defined_in, Arguments& arguments);
  Status bind_parameters(const MacroDefinition& macro, Scope& scope, Arguments& arguments);
  Status execute_call_block(const Stmt& stmt);
  Result<Value> call(const Value& callee, Arguments& arguments);
  Result<Arguments> evaluate_arguments(const std::vector<Argument>& arguments);

  // Expressions: evaluator.cc
  Result<Value> evaluate(const Expr& expr);
  Result<Value> dispatch(const Expr& expr);
  Result<Value> evaluate_name(const Expr& expr);
  Result<Value> evaluate_container(const Expr& expr);
  Result<Value> evaluate_dict(const Expr& expr);
  Result<Value> evaluate_access(const Expr& expr);
  Result<Value> evaluate_call(const Expr& expr);
  Result<Value> evaluate_filter(const Expr& expr);
  Result<Value> evaluate_test(const Expr& expr);
  Result<Value> evaluate_operation(const Expr& expr);
  Result<Value> evaluate_compare(const Expr& expr);
  Result<Value> evaluate_concat(const Expr& expr);
  Result<Value> evaluate_logic(const Expr& expr);
  Result<Value> evaluate_conditional(const Expr& expr);

  [[nodiscard]] Status locate(const Status& status, int line);

  Runtime& runtime_;
  Scope* scope_;
  std::string output_;
  std::string* out_ = &output_;     // where text goes: output_ or a capture
  std::vector<Value> block_texts_;  // of the filter and set blocks being applied
  int depth_ = 0;
};

/// Counts nested evaluation; check `status` before going on.
class Interpreter::DepthGuard final {
 public:
  explicit DepthGuard(Interpreter& interpreter) : interpreter_(interpreter) {
    ++interpreter_.depth_;
  }
  ~DepthGuard() { --interpreter_.depth_; }
  DepthGuard(const DepthGuard&) = delete;
  DepthGuard& operator=(const DepthGuard&) = delete;

  [[nodiscard]] Status status() const {
    NIBBLE_RETURN_IF_ERROR(interpreter_.runtime_.charge(kNodeWork));
    return interpreter_.depth_ <= interpreter_.runtime_.limits().depth
               ? Status()
               : template_error("the template nests calls too deeply (endless recursion?)");
  }

 private:
  Interpreter& interpreter_;
};

}  // namespace nibble::jinja
